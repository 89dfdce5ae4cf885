from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.tools.migration.example import CONFIG, MODULE, NAME, NEW, OLD, PACKAGE, config_module, package
from veomni_hook.finders import configs
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.tools.cli.app import app

DATA = Path(__file__).parents[2] / "data"

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`veomni-hook migrate` of a config in an environment with a release of the module."""
    monkeypatch.chdir(tmp_path)
    for place in (DATA, tmp_path / "configs", tmp_path / "installed", tmp_path / "made"):
        monkeypatch.syspath_prepend(str(place))
    (tmp_path / "made").mkdir()

    def invoke(*arguments: str, text: str = CONFIG, release: str = "5.9.0", source: str = OLD) -> Result:
        if not (tmp_path / "installed").exists():
            package(tmp_path / "installed", release, source)
            config_module(tmp_path / "configs", text)
        return CliRunner().invoke(app, ["migrate", NAME, *arguments])

    yield invoke
    gone = (PACKAGE, "patchgen_double", "reduced")
    for name in [n for n in sys.modules if n.partition(".")[0] in gone]:
        del sys.modules[name]


def reduced(tmp_path: Path) -> PatchConfig:
    return configs.load(["reduced"])[0].configs[0]


def test_what_is_printed(run: Run) -> None:
    done = run()
    assert done.exit_code == 0, done.output
    assert f"({MODULE}, written for transformers 5.9.0, on 5.9.0)" in done.output
    rows = [line for line in done.output.splitlines() if "Upgraded" in line]
    assert next(row for row in rows if "RMSNorm" in row).startswith("covered")
    assert "kernel: rms_norm/cast_before_weight" in done.output
    assert (
        "needed for sequence parallel (gather_outputs of veomni.distributed.sequence_parallel" in done.output
    )
    assert done.output.splitlines()[-1] == "1 covered, 5 kept"


def test_the_reduced_config_keeps_only_what_is_needed(run: Run, tmp_path: Path) -> None:
    done = run("-o", "made/reduced.py")
    assert done.exit_code == 0, done.output
    config = reduced(tmp_path)
    assert (config.source_module, config.device, config.transformers_version) == (MODULE, "gpu", "5.9.0")
    assert not config.lenient
    kinds = {patch.target: patch.patch_type.value for patch in config.patches}
    assert kinds == {
        "UpgradedModel.forward": "method_override",
        "UpgradedModel.angles": "method_override",
        "UpgradedModel.same": "method_override",
        "UpgradedModel.get_parallel_plan": "method_addition",
        "UpgradedHead.forward": "method_override",
    }
    allowed = {patch.target for patch in config.patches if patch.allow_signature_change}
    assert allowed == {"UpgradedHead.forward"}
    names = [name for spec in config.additional_imports for name in spec.names or ()]
    assert names == ["CausalLMOutputWithLogProbs", "gather_outputs"]
    assert [helper.__name__ for helper in config.helpers] == ["doubled"]
    assert config.post_import_blocks == [] and config.exclude == [] and not config.drop_imported_names


def test_replacements_are_imported_and_relative_imports_are_copied(run: Run, tmp_path: Path) -> None:
    run("-o", "made/reduced.py")
    text = (tmp_path / "made" / "reduced.py").read_text()
    ast.parse(text)
    assert f"from {NAME} import (\n    doubled,\n    head_forward,\n" in text
    assert text.count("def ") == 1
    assert f"from {PACKAGE}.parallel_plan import get_parallel_plan as made" in text
    assert "UpgradedRMSNorm.forward: kernel: rms_norm/cast_before_weight" in text.partition('"""\n\n')[0]
    checked = CliRunner().invoke(app, ["check", "upgraded", "--config", "reduced"])
    assert checked.exit_code == 0, checked.output


def test_slots_and_renamed_classes(run: Run, tmp_path: Path) -> None:
    text = CONFIG.replace(
        "    return gather_outputs(doubled(self.norm(x)))",
        "    if veomni_causal_lm_loss.use_non_eager_impl:\n        return OtherModel\n    return gather_outputs(x)",
    ).replace(
        '@config.override_method("UpgradedModel.forward", description="gather the output")',
        '@config.override_method("UpgradedModel.forward", name_map={"Other": "Upgraded", "Absent": "X"})',
    )
    done = run("-o", "made/reduced.py", text=text)
    assert done.exit_code == 0, done.output
    config = reduced(tmp_path)
    (block,) = config.post_import_blocks
    assert "veomni_causal_lm_loss" in block and "import OpSlot" in block and "veomni_rms_norm" not in block
    forward = next(patch for patch in config.patches if patch.target == "UpgradedModel.forward")
    assert forward.name_map == {"Other": "Upgraded"}


def test_an_import_that_changes_upstreams_own_code_stays(run: Run, tmp_path: Path) -> None:
    text = CONFIG.replace(
        'config.drop_import_names("NotImportedThere")',
        'config.drop_import_names("ModelOutput")\nconfig.add_import("outputs", names=["ModelOutput"])',
    )
    assert run("-o", "made/reduced.py", text=text).exit_code == 0
    config = reduced(tmp_path)
    assert config.drop_imported_names == {"ModelOutput"}
    assert "outputs" in [spec.module for spec in config.additional_imports]


def test_a_patch_whose_target_is_gone_is_left_out(run: Run, tmp_path: Path) -> None:
    base = str(package(tmp_path / "before", "5.9.0", OLD))
    done = run("-o", "made/reduced.py", "--written-for", base, "--json", release="5.23.0", source=NEW)
    assert done.exit_code == 1, done.output
    document = json.loads(done.stdout)
    outcomes = {patch["target"]: patch["outcome"] for patch in document["patches"]}
    assert outcomes["UpgradedModel.angles"] == "left out" and outcomes["UpgradedModel.forward"] == "kept"
    reasons = {patch["target"]: patch["reason"] for patch in document["patches"]}
    assert "Upstream has changed: new: cache=None" in reasons["UpgradedModel.forward"]
    assert (document["written_for"], document["release"], document["problems"]) == ("5.9.0", "5.23.0", [])
    text = (tmp_path / "made" / "reduced.py").read_text()
    assert text == document["reduced"] and "write it anew" in text
    assert "UpgradedModel.angles" not in {patch.target for patch in reduced(tmp_path).patches}


def test_a_config_that_is_not_needed_any_more(run: Run, tmp_path: Path) -> None:
    text = CONFIG.partition('@config.override_method("UpgradedModel.forward"')[0]
    done = run("-o", "made/reduced.py", text=text)
    assert done.exit_code == 0 and "is not needed any more" in done.output
    assert not (tmp_path / "made" / "reduced.py").exists()


def test_a_file_is_not_overwritten_by_accident(run: Run, tmp_path: Path) -> None:
    (tmp_path / "made" / "reduced.py").write_text("mine\n")
    refused = run("-o", "made/reduced.py")
    assert refused.exit_code == 2 and "--force" in refused.output
    assert (tmp_path / "made" / "reduced.py").read_text() == "mine\n"
    assert run("-o", "made/reduced.py", "--force").exit_code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import not_installed_at_all\n", "install the package that provides not_installed_at_all"),
        (
            "from veomni_hook import PatchConfig\nconfig = PatchConfig('transformers.models.*.modeling_*')\n",
            "is not for patchgen",
        ),
        (f"{CONFIG}\nconfigs = [PatchConfig('a'), PatchConfig('b')]\n", "holds 3 configs"),
        (CONFIG.replace(MODULE, "transformers.models.gone.modeling_gone"), "it is not installed"),
    ],
)
def test_a_config_that_cannot_be_reduced(run: Run, text: str, said: str) -> None:
    done = run(text=text)
    assert done.exit_code == 2 and said in done.output


def test_a_config_for_another_package(run: Run, tmp_path: Path) -> None:
    run()  # puts the releases and the double of patchgen in place
    config = "patchgen_double.tiny_gpu_patch_gen_config"
    done = CliRunner().invoke(app, ["migrate", config, "-o", "made/reduced.py", "--json"])
    document = json.loads(done.stdout)
    assert document["problems"] == [], done.output
    assert document["module"] == "patchgen_double.modeling_tiny"
    assert {patch["outcome"] for patch in document["patches"]} == {"kept"}
    text = (tmp_path / "made" / "reduced.py").read_text()
    for verb in ("modify_init", "replace_function", "override_method", "add_method", "add_helper"):
        assert f"config.{verb}(" in text
    assert '    create_patch_from_external(\n        "TinyNorm",\n' in text and "PatchType" not in text


def test_a_file_is_not_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "there.py").touch()
    missing, there = (CliRunner().invoke(app, ["migrate", name]) for name in ("missing.py", "own/there.py"))
    assert missing.exit_code == there.exit_code == 2
    assert "there is no file missing.py" in missing.stderr
    assert "own/there.py is a file" in there.stderr and "name the module: own.there" in there.stderr
