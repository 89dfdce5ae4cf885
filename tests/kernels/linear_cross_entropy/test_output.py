from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors
from torch.nn.parallel.distributed import _find_tensors
from torch.utils import _pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.kernels.linear_cross_entropy.routed import batch, pair
from veomni_hook.errors import VeomniHookWarning
from veomni_hook.kernels.linear_cross_entropy.output import HELD, DeferredLogits, LazyLogits, logits_are_read
from veomni_hook.kernels.selection.process_choice import set_choice


@pytest.fixture
def made(patched):
    """A patched model in training, its output with unread logits, and upstream's output."""
    set_choice("linear_cross_entropy=torch")
    upstream, model = pair(patched)
    inputs = {**batch(), "output_hidden_states": True, "use_cache": False}
    return model, model(**inputs), upstream(**inputs)


def unread(output):
    return isinstance(output.__dict__[HELD], DeferredLogits)


READERS = {
    "attribute": lambda output: output.logits,
    "key": lambda output: output["logits"],
    "index": lambda output: output[1],
    "negative index": lambda output: output[-2],
    "slice": lambda output: output[:2][1],
    "get": lambda output: output.get("logits"),
    "items": lambda output: dict(output.items())["logits"],
    "values": lambda output: list(output.values())[1],
    "to_tuple": lambda output: output.to_tuple()[1],
    "dict": lambda output: dict(output)["logits"],
    "unpacked": lambda output: {**output}["logits"],
    "getattr": lambda output: getattr(output, "logits", None),
    "copy": lambda output: copy.copy(output).logits,
    "pickle": lambda output: pickle.loads(pickle.dumps(output)).logits,
    "merged": lambda output: (output | {})["logits"],
    "fields": lambda output: {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}["logits"],
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_way_of_reading_gives_upstreams_logits(made, read):
    model, output, expected = made
    assert unread(output)
    logits = read(output)
    assert torch.equal(logits, expected.logits)
    assert not unread(output)
    assert output.logits is output["logits"]
    assert "read" in logits_are_read(model)


def test_values_that_are_no_fields_are_an_error(made):
    kind = type(made[1])
    with pytest.raises(TypeError, match="has only the fields loss, logits"):
        kind(None, scores=1)
    with pytest.raises(TypeError, match="has only the fields"):
        kind(*range(9))


def test_printing_and_comparing_read(made):
    _, output, expected = made
    assert str(output.loss.item())[:5] in repr(output)
    assert not unread(output)
    assert output != expected


READING_NOTHING = {
    "loss": lambda output: output.loss,
    "loss by key": lambda output: output["loss"],
    "loss by index": lambda output: output[0],
    "another field": lambda output: output.hidden_states,
    "keys": lambda output: (list(output), list(output.keys()), "logits" in output, len(output)),
    "isinstance": lambda output: isinstance(output, CausalLMOutputWithPast | dict | OrderedDict),
    "flatten": lambda output: _pytree.tree_flatten(output),
    "flatten with keys": lambda output: _pytree.tree_flatten_with_path(output),
    "tree_map": lambda output: _pytree.tree_map(lambda x: x, output),
    "FSDP: apply": lambda output: _apply_to_tensors(lambda x: x, output),
    "DDP: find": lambda output: list(_find_tensors(output)),
    "replace": lambda output: dataclasses.replace(output, loss=None),
}


@pytest.mark.parametrize("look", READING_NOTHING.values(), ids=READING_NOTHING)
def test_looking_elsewhere_computes_nothing(made, look):
    model, output, expected = made
    result = look(output)
    assert unread(output) and logits_are_read(model) is None
    if isinstance(result, LazyLogits):
        assert unread(result)
        assert list(result) == [name for name in expected if getattr(result, name) is not None]
        assert torch.equal(result.logits, expected.logits)


def test_a_mapped_output_keeps_its_values(made):
    _, output, expected = made
    mapped = _pytree.tree_map(lambda x: x * 2, output)
    assert type(mapped) is type(output)
    assert torch.allclose(mapped.loss, expected.loss * 2)
    assert torch.equal(mapped.hidden_states[0], expected.hidden_states[0] * 2)
    leaves, spec = _pytree.tree_flatten(output)
    assert len(leaves) == spec.num_leaves == 1 + len(expected.hidden_states)


def test_a_read_output_is_flattened_with_its_logits(made):
    _, output, expected = made
    assert output.logits is not None
    assert len(_pytree.tree_leaves(output)) == len(_pytree.tree_leaves(expected))
    mapped = _pytree.tree_map(lambda x: x * 2, output)
    assert torch.equal(mapped.logits, expected.logits * 2)


def test_accelerate_moves_outputs_without_reading(made):
    operations = pytest.importorskip("accelerate.utils.operations")
    _, output, expected = made
    for result in (
        operations.recursively_apply(lambda x: x, output),
        operations.send_to_device(output, "cpu"),
    ):
        assert unread(output) and unread(result)
        assert torch.equal(result.logits, expected.logits)


def test_accelerates_mixed_precision_casts_what_is_unread(patched):
    operations = pytest.importorskip("accelerate.utils.operations")
    set_choice("linear_cross_entropy=torch")
    upstream, model = pair(patched)
    inputs = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, output = upstream(**inputs), model(**inputs)
    converted = operations.convert_to_fp32(output)
    assert unread(converted) and logits_are_read(model) is None
    assert converted.logits.dtype is torch.float32
    assert torch.equal(converted.logits, expected.logits.float())
    assert converted.logits.requires_grad


def test_an_output_is_rebuilt_from_pairs(made):
    _, output, _ = made
    rebuilt = type(output)((name, torch.ones(2)) for name in output)
    assert list(rebuilt) == list(output)
    assert torch.equal(rebuilt.logits, torch.ones(2))


def test_logits_can_be_assigned(made):
    model, output, _ = made
    output.logits = torch.zeros(3)
    assert torch.equal(output["logits"], torch.zeros(3)) and torch.equal(output[1], torch.zeros(3))
    output["logits"] = torch.ones(3)
    assert torch.equal(output.logits, torch.ones(3))
    assert logits_are_read(model) is None


def test_logits_carry_gradients(made):
    model, output, expected = made
    with torch.no_grad():
        logits = output.logits
    (output.loss + logits.square().mean()).backward()
    assert model.lm_head.weight.grad is not None and expected.logits.requires_grad


def test_logits_after_the_weights_changed_are_a_warning(made):
    model, output, _ = made
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.warns(VeomniHookWarning, match="weights"):
        assert output.logits is not None


def test_logits_after_the_hidden_states_changed_are_a_warning(made):
    _, output, _ = made
    deferred = output.__dict__[HELD]
    with torch.no_grad():
        deferred._hidden_states.mul_(2)
    with pytest.warns(VeomniHookWarning, match="the hidden states have changed"):
        assert output.logits is not None


def test_logits_before_the_weights_changed_are_not(made):
    model, output, expected = made
    output.loss.backward()
    logits = output.logits
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert output.logits is logits and torch.equal(logits, expected.logits)


def test_a_model_whose_logits_are_read_computes_them_from_its_next_step_on(made):
    model, output, _ = made
    other = copy.deepcopy(model)
    assert isinstance(model(**batch()), LazyLogits)
    assert output.logits is not None
    assert not isinstance(model(**batch()), LazyLogits)
    assert isinstance(other(**batch()), LazyLogits)


def test_a_pickled_output_loads_without_this_package(made, tmp_path):
    _, output, _ = made
    path = tmp_path / "output.pickle"
    path.write_bytes(pickle.dumps(output))
    script = (
        "import pickle, sys; sys.modules['veomni_hook'] = None\n"
        f"output = pickle.load(open({str(path)!r}, 'rb'))\n"
        "print(type(output).__module__, tuple(output.logits.shape))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split()[0] == "transformers.modeling_outputs"


CHANGES = {
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True).step(),
    "through data": lambda model: model.lm_head.weight.data.add_(1),
    "one number through data": lambda model: model.lm_head.weight.data[3, 5].add_(1),
    "other data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 2),
    "a new Parameter": lambda model: setattr(
        model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    ),
    "another shape": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.ones(70, 32))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_logits_after_a_change_that_versions_do_not_show_are_a_warning(made, change):
    model, output, _ = made
    output.loss.backward()
    change(model)
    with pytest.warns(VeomniHookWarning, match="weights of the head have changed"):
        assert output.logits is not None


def test_logits_of_a_head_that_was_moved_and_not_changed_are_no_warning(made):
    model, output, expected = made
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert torch.equal(output.logits, expected.logits)
