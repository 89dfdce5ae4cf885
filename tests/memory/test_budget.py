"""Budgets of memory: what is chosen for a model that trains, and what its step then takes."""

import pytest

from tests.once import once
from tests.processes import facts, outputs, started
from veomni_hook.memory.budget import SHARE
from veomni_hook.memory.parts import LADDER


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return once(
        tmp_path_factory,
        "memory-budgets",
        lambda: facts(started("-m", "tests.memory.facts_of_budgets", VEOMNI_MEMORY="auto")),
    )


@pytest.mark.parametrize("case", ["llama 2.0", "llama 0.8", "qwen3_moe 0.8", "llama with LoRA 0.8"])
def test_a_step_keeps_its_budget_and_its_gradients(told, case):
    step = told["cases"][case]
    assert step["took"] <= SHARE * step["budget"]
    assert (step["layers"] > 0) is (step["before"] > step["budget"])
    assert step["said"] == [f"memory: {step['chosen']}"]
    assert "offload" not in step["chosen"]  # nothing is predicted beyond what fits
    assert step["off"] < 1e-6


def test_where_nothing_fits_the_parts_that_need_the_least_are_on(told):
    step = told["cases"]["llama 0.01"]
    assert step["chosen"].endswith("; nothing fits")
    assert all(f"with {text}" in step["chosen"] for text in LADDER)
    assert LADDER[step["parts"]] == "checkpoint,tiles"  # what goes to the host stays on this device
    assert step["took"] < step["before"] / 2
    assert step["off"] < 1e-6


def test_trainer_keeps_it_too(told):
    """It accumulates gradients, which the first batch of a step does not find."""
    for step in told["by_trainer"].values():
        assert [line.split(", ")[1] for line in step["said"]] == ["2 x 24 tokens"] * 2
        assert "as it is" in step["said"][0] and "with checkpoint" in step["said"][0]
        assert step["layers"] == 4
        assert step["off"] < 1e-6


def test_what_cannot_be_predicted_gets_all_parts_and_a_warning(told):
    why = {
        "no loss": "the model returns no loss",
        "shared": "processes share this model's sequences or experts",
    }
    for change, words in why.items():
        assert told["refused"][change]["warned"] == [f"VEOMNI_MEMORY: all parts are on, because {words}"]
        assert LADDER[told["refused"][change]["parts"]] == LADDER[-1]


def test_is_asked_again_for_longer_batches_and_gradients_that_stay(told):
    assert [line.split(", ")[1] for line in told["grown"]] == [
        "1 x 16 tokens",
        "1 x 8 tokens",
        "1 x 32 tokens",
    ]


def test_a_backward_keeps_the_parts_of_its_forward(told):
    assert told["changed"] == 0.0


COMPILED = """
import torch, veomni_hook.install, veomni_hook
from tests.memory.facts_of_models import model_of
model = model_of("llama")
ids = torch.ones(1, 16, dtype=torch.long)
torch.compile(model, backend="aot_eager", fullgraph=True)(input_ids=ids, labels=ids, use_cache=False).loss.backward()
print(veomni_hook.explain(model).notes[0])
"""


def test_compiled_models_choose_nothing_and_say_so():
    said = outputs(started("-c", COMPILED, VEOMNI_MEMORY="1GiB"))[0]
    assert "a step may take 1.00 GiB: parts are chosen at its first call" in said
