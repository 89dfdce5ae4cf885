"""Attention with sinks or a softcap in real models: equal to upstream's, and a user's choice wins over auto."""

from pathlib import Path

import pytest

from tests import processes
from tests.once import once

SCRIPT = Path(__file__).with_name("facts_of_attention.py")
FLEX = ["flex"]
CHOSEN = ["eager: attn_implementation='eager' was chosen"]
NOT_STORED = "reads the attention weights, which the kernel does not store"


@pytest.fixture
def facts(tmp_path_factory, model):
    return once(tmp_path_factory, f"attention of {model}", lambda: facts_of(model, tmp_path_factory))


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
    return once(tmp_path_factory, "choices of attention", lambda: facts_of("choices", tmp_path_factory))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return facts_of("compiled", tmp_path_factory)


def facts_of(mode, tmp_path_factory, **variables):
    return processes.facts(
        processes.started(SCRIPT, mode, cache=tmp_path_factory.mktemp("cache"), **variables)
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_oss", "gemma2"])
def test_training_equals_upstreams(facts, model):
    kinds = facts["trained"]
    assert {name: kind["runs"] for name, kind in kinds.items()} == dict.fromkeys(kinds, FLEX)
    assert {name for name, kind in kinds.items() if kind["worst"] > 1e-5} == set()
    assert {"left", "packed", "checkpointed", "checkpointed, reentrant"} <= kinds.keys()
    assert all(kind["gradients"] > 20 for kind in kinds.values())


@pytest.mark.slow
def test_training_in_tiles_equals_upstreams(tmp_path_factory):
    """DeepSeek-V4: chosen keys beside a window, all heads share a key, which is the value."""
    pytest.importorskip("triton")
    kinds = facts_of("tiles", tmp_path_factory, TRITON_INTERPRET="1")
    assert all(kind["runs"] == ["tiles"] for kind in kinds.values())
    assert {name for name, kind in kinds.items() if kind["worst"] > 2e-4} == set()
    assert all(kind["gradients"] > 20 for kind in kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_oss", "gemma2"])
def test_generation_equals_upstreams(facts, model):
    caches = facts["generated"]
    calls = ["flex", "there is one query: decoding"]
    assert caches == {key: {"equal": True, "new": 6, "calls": calls} for key in ("dynamic", "static")}


@pytest.mark.slow
def test_where_nobody_chose_auto_chooses(choices):
    assert choices["value"] == "eager"
    names = ("default", "second model of the config", "deep copy", "pickled", "loaded")
    assert {name: choices[name] for name in names} == dict.fromkeys(names, FLEX)


@pytest.mark.slow
def test_a_choice_wins(choices):
    names = ("explicit eager", "explicit, deep copy", "requested eager", "assigned eager", "loaded as eager")
    assert {name: choices[name] for name in names} == dict.fromkeys(names, CHOSEN)
    assert choices["sdpa"] is True
    assert "cannot be run on CPU" in choices["flex_attention"]
    assert choices["flex_attention runs"] == ["eager: attn_implementation='flex_attention' was chosen"]
    assert choices["gemma3, whose default is sdpa"] == ["eager: transformers uses attn_implementation='sdpa'"]
    assert choices["saved"] is False


@pytest.mark.slow
def test_weights_that_are_asked_for_and_a_replaced_function_stay_upstreams(choices):
    assert choices["output_attentions"] == [f"eager: output_attentions {NOT_STORED}"]
    assert choices["attentions"] == [[2, 4, 41, 41]] * 2
    assert choices["afterwards"] == FLEX
    assert choices["replaced"] == ["replaced"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_oss", "gemma2"])
def test_compiled_models_equal_upstreams(compiled, model):
    kinds = compiled["models"][model]
    assert {name for name, kind in kinds.items() if kind["worst"] > 1e-5} == set()
    assert [kind["runs"] for kind in kinds.values()] == [FLEX] * 2
    # One graph for the first length, and one for all others; two layers in each.
    assert {name: (kind["graphs"], kind["calls"]) for name, kind in kinds.items()} == {
        "plain": (2, 4),
        "checkpointed": (1, 2),
    }


@pytest.mark.slow
def test_compiled_models_return_the_weights_that_are_asked_for(compiled):
    before, shapes, after = compiled["weights"]
    assert before == FLEX
    assert shapes == [[2, 4, 41, 41]] * 2
    assert after == [
        f"eager: left to Inductor: flex refused the call: a forward hook of the module {NOT_STORED}"
    ]


@pytest.mark.slow
def test_masks_that_are_unknown_in_compiled_code_are_left_to_inductor(choices):
    assert choices["compiled"] == FLEX
    (reason,) = choices["compiled, padded"]
    assert reason.startswith(
        "eager: left to Inductor: flex refused the call: the attention mask is not known"
    )
    assert choices["compiled layers"] == [reason]


@pytest.mark.slow
def test_an_unknown_choice_counts_as_one(tmp_path_factory):
    (reason,) = facts_of("late", tmp_path_factory)["runs"]
    assert "transformers was imported before veomni_hook" in reason
