"""TRL's trainers for 20 steps: without the hook, with it, with TRL's own head, with less memory, on two processes.

`make recipes` has TRL.
"""

import json
import sys

import pytest

from tests.recipes import tiny
from tests.recipes.running import environment, run
from tests.recipes.test_recipes import require
from tests.recipes.trl_steps import CASES, STEPS

pytestmark = pytest.mark.slow

# Not `-m`: dill, which `datasets` uses, would pickle the functions of `__main__` with all that they read.
DRIVE = "from tests.recipes.trl_steps import main; main()"
# torchrun starts files and modules.
OF_RANKS = ("-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc_per_node")
OWN = {"dpo-weighted": "log_sum_sq_probs"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    require("trl", "peft")
    folder = tmp_path_factory.mktemp("trl")
    # So wide that MLPs run in tiles, and several heads of keys.
    model = tiny.dense(folder / "model", intermediate_size=80, num_key_value_heads=2)
    kinds = {
        "without": {"VEOMNI_HOOK": "0"},
        "hook": {"VEOMNI_KERNELS": "torch"},
        "eager": {"VEOMNI_KERNELS": "torch,linear_cross_entropy=eager"},
        "memory": {"VEOMNI_KERNELS": "torch", "VEOMNI_MEMORY": "offload,tiles"},
    }
    found = {kind: steps(folder, kind, model, CASES, variables) for kind, variables in kinds.items()}
    shared = {"VEOMNI_KERNELS": "torch", "VEOMNI_PARALLEL": "sp=2"}
    found["shared"] = steps(folder, "shared", model, CASES, shared, ranks=2)
    found["one"] = steps(folder, "one", model, ["whole"], kinds["hook"])
    found["four"] = steps(folder, "four", model, ["apart"], shared, ranks=4)
    return found


def steps(folder, kind, model, cases, variables, ranks=1):
    """What `trl_steps` writes."""
    out = folder / f"{kind}.json"
    launcher = [] if ranks == 1 else [sys.executable, *OF_RANKS, str(ranks)]
    command = [*launcher, sys.executable, "-c", DRIVE, str(out), str(model), *cases]
    run(command, folder, 300 * ranks, environment(folder, **variables))
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["hook", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_the_losses_of_all_steps_are_those_without_the_hook(trained, case, kind):
    expected, got = trained["without"][case], trained[kind][case]
    assert len(got["losses"]) == len(expected["losses"]) == STEPS
    assert len({round(loss, 7) for loss in expected["losses"]}) > STEPS / 2
    assert got["losses"][0] == pytest.approx(expected["losses"][0], abs=1e-5)
    assert got["losses"] == pytest.approx(expected["losses"], abs=1e-4)
    for step, other in zip(got["logged"], expected["logged"], strict=True):
        assert step == pytest.approx(other, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_the_setting_memory_changes_no_loss(trained, case):
    expected, found = trained["hook"][case], trained["memory"][case]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4, abs=1e-6)
    assert found["parts"] == ["Qwen3MLP", "heads"] and found["blocks"] > 0
    assert "checkpointed: 2 Qwen3DecoderLayer" in found["explanation"]
    assert not expected["parts"] and not expected["blocks"]


@pytest.mark.parametrize("case", CASES)
def test_explain_says_who_computed_log_probabilities(trained, case):
    assert "its own function in" in trained["eager"][case]["explanation"]
    told = trained["hook"][case]["explanation"]
    (line,) = [line for line in told.splitlines() if line.startswith("  TRL's log-probabilities: ")]
    calls = int(line.split("veomni_hook.token_log_probs in ")[1].split()[0])
    if case in OWN:
        assert calls == 0 and f"its own function in {STEPS} calls: {OWN[case]}" in line
    else:
        assert calls >= STEPS and "its own function" not in line


@pytest.mark.parametrize("case", CASES)
def test_two_processes_that_share_sequences_train_as_one(trained, case):
    expected, found = trained["hook"][case], trained["shared"][case]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4, abs=1e-4)
    for step, other in zip(found["logged"], expected["logged"], strict=True):
        assert step == pytest.approx(other, rel=1e-3, abs=1e-3)


def test_completions_of_a_prompt_in_two_groups_of_processes(trained):
    expected, found = trained["one"]["whole"], trained["four"]["apart"]
    norms = [step["grad_norm"] for step in expected["logged"]]
    assert min(norms) > 0
    assert [step["grad_norm"] for step in found["logged"]] == pytest.approx(norms, rel=1e-3)
    for key in ("reward", "reward_std", "num_tokens"):
        assert [step[key] for step in found["logged"]] == [step[key] for step in expected["logged"]]
