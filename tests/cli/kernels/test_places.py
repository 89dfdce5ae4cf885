from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.patches import fake_idiom
from veomni_hook.cli.app import app
from veomni_hook.cli.inputs.targets import transformers_folder
from veomni_hook.patches.idioms import recognise

from ..conftest import Command

FAMILIES = ("bert", "qwen3", "qwen3_moe")
MODULES = {name: f"transformers.models.{name}.modeling_{name}" for name in FAMILIES}
TWO_FORMULAS = """
class TwoRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6, with_scale=True):
        super().__init__()
        self.eps = eps
        self.with_scale = with_scale
        if with_scale:
            self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.pow(x.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)

    def forward(self, hidden_states):
        normed_output = self._norm(hidden_states.float())
        if self.with_scale:
            normed_output = normed_output * self.weight.float()
        return normed_output.type_as(hidden_states)
"""

Kernels = Callable[..., Result]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Run `veomni-hook kernels` with nobody's settings."""
    monkeypatch.delenv("VEOMNI_KERNELS", raising=False)
    return lambda *arguments: CliRunner().invoke(app, ["kernels", *arguments])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A transformers package of three families, with a shared module that has no candidates."""
    for name in FAMILIES:
        file = Path("models", name, f"modeling_{name}.py")
        (tmp_path / "transformers" / file).parent.mkdir(parents=True)
        shutil.copy(Path(transformers_folder(), file), tmp_path / "transformers" / file)
    (tmp_path / "transformers" / "modeling_layers.py").write_text("x = 1\n")
    return tmp_path


def listed(done: Result) -> dict[tuple[str, str], tuple[str, str]]:
    """What each op of each target got, and why."""
    assert done.exit_code == 0, done.output
    return {(s["target"], s["op"]): (s["backend"], s["reason"]) for s in json.loads(done.stdout)["sites"]}


def test_the_places_of_a_family_get_kernels_of_another_system(kernels: Kernels) -> None:
    sites = listed(kernels("qwen3", "--system", "ascend", "--json"))
    for place in [
        ("Qwen3RMSNorm.forward", "rms_norm"),
        ("Qwen3MLP.forward", "gated_mlp"),
        ("apply_rotary_pos_emb", "rotary"),
        ("Qwen3ForCausalLM.forward", "linear_cross_entropy"),
    ]:
        assert sites[place] == ("npu", "can run here")
    on_cuda = listed(kernels("qwen3", "--system", "sm90", "--json"))
    assert on_cuda.keys() == sites.keys()
    assert on_cuda["Qwen3RMSNorm.forward", "rms_norm"][0] == "triton"


def test_every_routed_candidate_is_there_once(kernels: Kernels) -> None:
    report = json.loads(kernels("qwen3_moe", "qwen3", "--system", "ascend", "--json").stdout)
    covered = json.loads(CliRunner().invoke(app, ["coverage", "qwen3_moe", "qwen3", "--json"]).stdout)
    rows = [row for row in covered if row["op"] not in ("layer_loop", "speech")]  # which ask for no kernel
    fields = ("module", "target", "op", "variant")
    routed = [tuple(row[field] for field in fields) for row in rows if row["status"] == "routed"]
    assert [tuple(site[field] for field in fields) for site in report["sites"]] == routed
    assert ("Qwen3MoeExperts.forward", "gated", "npu") in {
        (site["target"], site["variant"], site["backend"]) for site in report["sites"]
    }
    rotary = [site["target"] for site in report["sites"] if site["op"] == "rotary"]
    assert rotary == ["apply_rotary_pos_emb"] * 2  # at whose calls the slots are asked
    assert report["totals"]["sites"] == len(routed)
    assert report["totals"]["unrouted"] == len(rows) - len(routed)


def test_an_op_without_a_kernel_there_says_why(kernels: Kernels) -> None:
    backend, reason = listed(kernels("qwen3", "--system", "cpu", "--json"))[
        "Qwen3Attention.forward", "qk_norm_rotary"
    ]
    assert backend == "eager"
    assert reason.startswith("no kernel can run here: triton needs a device of type cuda, found cpu")
    assert reason.endswith("; rms_norm and rotary ask for kernels separately")


def test_the_choice_of_the_settings_decides(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEOMNI_KERNELS", "rms_norm=eager")
    sites = listed(kernels("qwen3", "--system", "ascend", "--json"))
    assert sites["Qwen3RMSNorm.forward", "rms_norm"] == ("eager", "rms_norm=eager is chosen")
    assert sites["Qwen3MLP.forward", "gated_mlp"][0] == "npu"


def test_a_backend_by_name_that_cannot_run_is_none(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEOMNI_KERNELS", "triton")
    sites = listed(kernels("qwen3", "--system", "ascend", "--json"))
    backend, reason = sites["Qwen3RMSNorm.forward", "rms_norm"]
    assert backend == "none"
    assert reason.endswith("cannot use 'triton': needs a device of type cuda, found npu")
    (row,) = json.loads(kernels("qwen3", "--system", "ascend", "--models", "--json").stdout)["models"]
    assert row["backends"]["none"] == [backend for backend, _ in sites.values()].count("none") > 0


def test_a_place_with_two_formulas_counts_once(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "two.py"
    file.write_text("import torch\nfrom torch import nn\n" + TWO_FORMULAS)
    report = json.loads(kernels(str(file), "--system", "ascend", "--json").stdout)
    (site,) = report["sites"]
    assert site["variant"] == "weight_before_cast|unweighted"
    assert site["backends"] == {"weight_before_cast": "npu", "unweighted": "npu"}
    assert (site["backend"], site["reason"]) == ("npu", "can run here")
    assert report["totals"]["backends"]["npu"] == 1
    monkeypatch.setenv("VEOMNI_KERNELS", "rms_norm=liger")
    (site,) = json.loads(kernels(str(file), "--system", "sm90", "--json").stdout)["sites"]
    assert site["backends"] == {"weight_before_cast": "liger", "unweighted": "none"}
    assert site["backend"] == "none"
    assert site["reason"].startswith("unweighted: rms_norm/unweighted has no 'liger' kernel")
    assert site["reason"].endswith("; weight_before_cast gets liger")


def test_the_summary_is_the_sum_of_its_rows(kernels: Kernels, package: Path) -> None:
    arguments = ("--system", "ascend", "--source", str(package))
    report: dict[str, Any] = json.loads(kernels("--models", *arguments, "--json").stdout)
    rows, total = report["models"], report["totals"]
    assert [row["family"] for row in rows] == [*FAMILIES]
    assert [*total["backends"]][-2:] == ["eager", "none"]
    for row in (*rows, total):
        assert row["sites"] == sum(row["backends"].values())
    for name in total["backends"]:
        assert total["backends"][name] == sum(row["backends"][name] for row in rows)
    assert total["sites"] == sum(row["sites"] for row in rows)
    assert total["unrouted"] == sum(row["unrouted"] for row in rows)
    sites = json.loads(kernels(*FAMILIES, *arguments, "--json").stdout)["sites"]
    for row in rows:
        found = Counter(site["backend"] for site in sites if site["family"] == row["family"])
        assert found == Counter(row["backends"])


def test_tables(kernels: Kernels) -> None:
    lines = kernels("qwen3", "--system", "ascend").stdout.splitlines()
    assert lines[0] == "npu, all packages assumed; kernels = auto"
    assert lines[1].split() == ["family", "target", "op", "variant", "backend", "reason"]
    norm = ["qwen3", "Qwen3RMSNorm.forward", "rms_norm", "cast_before_weight", "npu", "can", "run", "here"]
    assert norm in [line.split() for line in lines]
    assert re.fullmatch(r"\d+ routed: npu \d+, .*eager \d+, none 0; 0 candidates are not routed", lines[-1])
    lines = kernels("qwen3", "bert", "--system", "ascend", "--models").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["family", "bert", "qwen3", "total"]
    assert lines[1].split()[1:3] == ["routed", "npu"] and lines[1].endswith("not routed")


def test_wrong_use(kernels: Kernels) -> None:
    unknown = kernels("qwne3", "--system", "ascend")
    assert (unknown.exit_code, unknown.stdout) == (2, "")
    assert "unknown family 'qwne3'" in unknown.stderr and "nearest names: qwen3" in unknown.stderr
    nothing = kernels("--system", "ascend", "--jobs", "1")
    assert (nothing.exit_code, nothing.stdout) == (
        2,
        "",
    ) and "name families, or add --models" in nothing.stderr
    system = kernels("qwen3", "--system", "sm9")
    assert (system.exit_code, system.stdout) == (2, "")


def test_what_cannot_be_examined_is_named_once(
    kernels: Kernels, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recognise, "idioms", lambda: (fake_idiom.module(),))
    for name in ("bert", "qwen3"):
        file = package / "transformers" / "models" / name / f"modeling_{name}.py"
        file.write_text("class A:\n    def forward(self):\n        boom\n")
    done = kernels("--models", "--system", "ascend", "--source", str(package), "--json")
    assert done.exit_code == 1
    assert f"{MODULES['bert']} and 1 more: the idiom scaling raised" in done.stderr
    assert [row["family"] for row in json.loads(done.stdout)["models"]] == [*FAMILIES]


def test_nothing_of_torch_and_transformers_is_imported(veomni: Command) -> None:
    done = veomni("kernels", "qwen3", "--system", "ascend", flags=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines() if "|" in line}
    assert done.status == 0 and "Qwen3RMSNorm.forward" in done.out
    assert "veomni_hook.cli.kernels.places" in imported
    assert imported.isdisjoint({"torch", "transformers"})
