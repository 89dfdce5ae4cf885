"""Remote code with the installed transformers: patched where the user wants it, shipped as it came."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import dynamic_module_utils

from tests.finders import facts_of_remote_code
from tests.finders.conftest import DATA, ROOT
from tests.processes import outputs, started

SCRIPT = Path(__file__).with_name("facts_of_remote_code.py")
REPOSITORY = DATA / "remote_repo"
MODELS = {
    "off": {},
    "patched": {"VEOMNI_REMOTE_CODE": "1", "VEOMNI_PATCHES": "remote_config", "VEOMNI_IDIOMS": "0"},
    "idioms": {"VEOMNI_REMOTE_CODE": "1", "VEOMNI_KERNELS": "reference"},
    "early": {"VEOMNI_REMOTE_CODE": "1"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The facts and the error output of every mode."""
    base = tmp_path_factory.mktemp("remote")
    running = {}
    for mode, variables in MODELS.items():
        folder = copied(base / mode)
        running[mode] = started(
            SCRIPT, mode, folder / "pebble-repo", folder / "saved", cwd=folder, cache=folder / "cache",
            PYTHONPATH=os.pathsep.join(map(str, (DATA / "configs", ROOT))), HF_HOME=str(folder / "hf"), **variables,
        )  # fmt: skip
    plain = unpatched(copied(base / "plain"))
    found = {}
    for mode, process in running.items():
        out, errors = outputs(process)
        found[mode] = json.loads(out.splitlines()[-1]), errors
    return {"plain": (plain, ""), **found}


def copied(folder):
    shutil.copytree(REPOSITORY, folder / "pebble-repo", ignore=shutil.ignore_patterns("__pycache__"))
    seed(folder / "pebble-repo")
    return folder


def unpatched(folder):
    """The facts of transformers by itself, in this process."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "hf" / "modules"))
        patch.setattr(sys, "path", [*sys.path])
        facts = facts_of_remote_code.found("plain", str(folder / "pebble-repo"), str(folder / "saved"))
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "transformers_modules":
            del sys.modules[name]
    return json.loads(json.dumps(facts))


def seed(repository):
    """Weights: the same in every mode."""
    torch.manual_seed(0)
    shapes = {"embed.weight": (32, 16), "mix.weight": (16, 16), "head.weight": (32, 16)}
    vectors = ("inner.gain", "mix.bias", "outer.weight")
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    weights |= {name: torch.rand(16) for name in vectors}
    save_file(weights, repository / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def plain(runs):
    return runs["plain"][0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("norm", ["inner", "outer"])
def test_the_entry_module_and_what_it_imports_run_patched_code(runs, norm):
    facts = runs["patched"][0][norm]
    assert "* 1.0)" in facts["method"]
    assert facts["line"].lstrip().startswith("def forward")
    assert "cache" in Path(facts["code"]).parts and facts["code"].endswith("_pebble.py")
    assert facts["loader"] == "RemoteLoader" and "* 1.0)" in facts["loader_source"]
    assert [p["target"] for p in runs["patched"][0]["outcomes"][facts["name"]]["report"]["applied"]] == [
        f"Pebble{norm.title()}RMSNorm.forward"
    ]


@pytest.mark.parametrize("mode", ["patched", "idioms", "off"])
def test_the_modules_file_stays_the_original(runs, plain, mode):
    for norm in ("inner", "outer"):
        facts = runs[mode][0][norm]
        assert facts["name"] == plain[norm]["name"]
        assert Path(facts["file"]).parts[-3:] == Path(plain[norm]["file"]).parts[-3:]
        assert "hf" in Path(facts["file"]).parts


def test_tracebacks_show_the_patched_line(runs):
    path, line = runs["patched"][0]["frame"]
    assert path == runs["patched"][0]["inner"]["code"]
    assert line == "return self.gain * (wide * scale).to(kind)"


@pytest.mark.parametrize("mode", ["patched", "off"])
def test_a_training_step_gives_the_same_numbers(runs, plain, mode):
    assert runs[mode][0]["trained"] == plain["trained"]
    assert runs[mode][0]["again"] == plain["again"] == plain["trained"]


@pytest.mark.parametrize("mode", ["patched", "idioms", "off", "plain"])
def test_what_is_saved_is_the_code_as_it_came(runs, mode):
    assert runs[mode][0]["saved"] == {path.name: path.read_text() for path in REPOSITORY.glob("*.py")}


def test_a_changed_file_is_patched_anew(runs, plain):
    assert plain["changed"]["same module"] is True
    changed = runs["patched"][0]["changed"]
    assert changed["same module"] is True
    assert "self.eps + 5) * 1.0)" in changed["method"].replace("(wide", "wide")
    assert "self.eps + 5" in changed["loader_source"]
    assert 5 in changed["constant"]


def test_it_is_off_by_default(runs):
    facts, errors = runs["off"]
    assert facts["inner"]["loader"] == facts["outer"]["loader"] == "SourceFileLoader"
    assert not any(name.startswith("transformers_modules") for name in facts["outcomes"])
    assert "transformers.dynamic_module_utils" not in facts["outcomes"]
    assert "veomni" not in errors


def test_loading_imported_too_early_is_reported(runs):
    facts, errors = runs["early"]
    assert "transformers imported too early. Models lose:" in errors
    assert "patches of remote code" in errors
    assert facts["outer"]["loader"] == "SourceFileLoader"


def test_idioms_route_remote_code(runs, plain):
    facts = runs["idioms"][0]
    assert facts["explained"] == [["rms_norm", "reference"]] * 2
    assert facts["trained"]["loss"] == pytest.approx(plain["trained"]["loss"], rel=1e-6)
    for name, gradient in plain["trained"]["gradients"].items():
        assert torch.allclose(
            torch.tensor(facts["trained"]["gradients"][name]), torch.tensor(gradient), rtol=1e-4, atol=1e-6
        )
