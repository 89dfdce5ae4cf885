"""`explain(model, plan=...)`: what is said of a step's memory."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, modeling_utils

from tests.tools.report.structure import Page
from veomni_hook.errors import InputError
from veomni_hook.memory import checkpoint, parts
from veomni_hook.memory.remedies import REMEDIES, of_one_row
from veomni_hook.sizes import bytes_of, readable
from veomni_hook.tools.report.explanation import explain
from veomni_hook.tools.report.memory_plan import MemoryPlan

MIB = 1 << 20


@pytest.fixture(scope="module")
def model():
    config = Qwen3Config(
        vocab_size=512, hidden_size=32, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def test_says_where_memory_goes_and_what_reaches_a_length(model):
    said = explain(model, plan={"batch": 2, "length": 256, "memory": "10MiB", "reach": 1024})
    plan = said.plan
    assert str(plan) in str(said) and str(plan) in said._repr_html_()
    assert "Qwen3ForCausalLM, 2 x 256 tokens, AdamW, cpu" in plan.title()
    assert plan.longest % 64 == 0 and plan.longest > 0
    names, peaks = zip(*plan.reached, strict=True)
    assert names[:2] == ("as it is", "gradient_checkpointing=True")
    assert names[2].endswith("one sequence a batch")
    assert peaks[0] > peaks[1] > peaks[2]
    assert not model.training and not model.is_gradient_checkpointing
    assert MemoryPlan.from_dict(plan.to_dict()) == plan
    assert "Where it goes" in Page(plan.to_html()).text


def test_the_longest_sequence_is_one_that_is_predicted_to_fit(model):
    plan = explain(model, plan={"length": 256, "memory": 24 * MIB, "optimizer": None}).plan

    def peak(length):
        return explain(model, plan={"length": length, "optimizer": None}).plan.peak

    assert peak(plan.longest) <= 24 * MIB < peak(2 * plan.longest)


def test_stops_at_the_first_setting_that_fits(model):
    plan = explain(model, plan={"batch": 2, "length": 256, "memory": "1GiB", "reach": 512}).plan
    assert [name for name, _ in plan.reached] == ["as it is"]
    assert next(iter(plan.statements())).startswith("In 1.00 GiB: up to")


def test_takes_a_batch_and_an_optimizer(model):
    ids = torch.zeros(3, 64, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    plan = explain(model, plan={"inputs": {"input_ids": ids, "labels": ids}, "optimizer": optimizer}).plan
    parts = dict(plan.parts)
    assert plan.shape == (3, 64) and plan.memory is None and plan.longest is None
    assert parts["optimizer"] == parts["weights"]


@pytest.mark.parametrize("wrong", [{"lenght": 3}, {"optimizer": "adamx"}, {"memory": "80 apples"}])
def test_refuses_what_it_does_not_know(model, wrong):
    with pytest.raises(InputError):
        explain(model, plan={"length": 16, **wrong})


def test_remedies_leave_the_model_as_it_was(model):
    checkpointed = REMEDIES["gradient_checkpointing=True"]
    layers = [dict(vars(layer)) for layer in model.model.layers]
    with checkpointed(model):
        assert model.model.layers[0].gradient_checkpointing
        assert checkpointed(model) is None
    assert [dict(vars(layer)) for layer in model.model.layers] == layers
    assert checkpointed(torch.nn.Linear(2, 2)) is None


def test_the_setting_is_a_remedy_where_patched_text_has_places_for_it(model, monkeypatch):
    remedy = REMEDIES["VEOMNI_MEMORY=checkpoint,tiles"]
    monkeypatch.delattr(modeling_utils, "veomni_chosen", raising=False)
    assert remedy(model) is None
    monkeypatch.setattr(modeling_utils, "veomni_chosen", checkpoint.chosen, raising=False)
    before = parts.in_force()
    with remedy(model):
        assert parts.in_force().checkpoint and parts.in_force().tiles and not parts.in_force().offload
        assert model.model.layers[0]._gradient_checkpointing_func is checkpoint.run
        assert remedy(model) is None
    assert parts.in_force() is before


def test_a_batch_of_one_row():
    assert of_one_row({"input_ids": torch.zeros(1, 4)}) is None
    assert of_one_row({"a": torch.zeros(2, 4), "n": 3})["a"].shape == (1, 4)


def test_sizes():
    assert bytes_of("80GiB") == 80 << 30 and bytes_of("1.5 GB") == 1_500_000_000 and bytes_of(12) == 12
    assert readable(3 << 30) == "3.00 GiB" and readable(MIB // 2) == "0.50 MiB"
