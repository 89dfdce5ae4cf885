import copy
import dataclasses
import gc
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Mapping

import pytest
import torch
from accelerate.utils.operations import (
    convert_to_fp32,
    find_batch_size,
    get_data_structure,
    recursively_apply,
    send_to_device,
)
from torch import nn
from torch.distributed.utils import _apply_to_tensors
from torch.nn.parallel.distributed import _find_tensors
from torch.utils import _pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.kernels.linear_cross_entropy.routed import as_library, batch, held_logits, pair, with_decoder
from tests.kernels.matching import close
from tests.processes import outputs, started
from veomni_hook.errors import KernelError, VeomniHookWarning
from veomni_hook.kernels.linear_cross_entropy.deferred import DeferredLogits, UnreadLogits, logits_are_read
from veomni_hook.kernels.linear_cross_entropy.output import LazyLogits
from veomni_hook.kernels.selection.process_choice import set_choice


@pytest.fixture(autouse=True)
def chosen():
    set_choice("linear_cross_entropy=torch")


@pytest.fixture
def made(patched):
    """A patched model in training, its output with unread logits, and upstream's output."""
    upstream, model = pair(patched)
    inputs = {**batch(), "output_hidden_states": True, "use_cache": False}
    return model, model(**inputs), upstream(**inputs)


def unread(output):
    logits = held_logits(output)
    return isinstance(logits, DeferredLogits) and logits.logits is None


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


def assert_same(got, expected):
    """Assert that two results are equal, in form and class, up to the rounding of a loss."""
    if isinstance(got, UnreadLogits):
        got = got.computed()
    if isinstance(got, LazyLogits):
        assert got.to_tuple()
    assert type(got) is type(expected)
    if isinstance(got, torch.Tensor):
        assert (got.dtype, got.requires_grad) == (expected.dtype, expected.requires_grad)
        torch.testing.assert_close(got, expected)
    elif isinstance(got, Mapping):
        assert_same([*got.items()], [*expected.items()])
    elif isinstance(got, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


def deleted(output):
    del output.logits
    return output.logits, hasattr(output, "logits"), output["logits"], output.to_tuple()


def set_to(value):
    def change(output):
        output.logits = value
        return output.logits, output["logits"], output.to_tuple(), list(output)

    return change


def raised(call, *args):
    try:
        call(*args)
    except Exception as error:
        return type(error), str(error)


def called_with(**named):
    return named


def moved(output):
    output.move_to_end("loss")
    return list(output.items())


def with_in_place(output):
    output |= {"loss": torch.ones(())}
    return list(output.items()), output.loss


#: What users do with outputs; the result, and the output afterwards, have to be what upstream's are.
USES = {
    "vars": lambda output: list(vars(output).items()),
    "built from vars": lambda output: CausalLMOutputWithPast(**vars(output)),
    "built from itself": lambda output: CausalLMOutputWithPast(**output),
    "built of the type": lambda output: type(output)(**vars(output)),
    "type afterwards": lambda output: (output.to_tuple(), type(output) is CausalLMOutputWithPast)[1],
    "names": lambda output: (type(output).__name__, type(output).__qualname__, type(output).__module__),
    "fields": lambda output: [field.name for field in dataclasses.fields(output)],
    "replace": lambda output: dataclasses.replace(output, loss=output.loss * 2),
    "replace logits": lambda output: dataclasses.replace(output, logits=None),
    "asdict": lambda output: raised(dataclasses.asdict, output),
    "deepcopy": lambda output: raised(copy.deepcopy, output),
    "copy": copy.copy,
    "own copy": lambda output: output.copy(),
    "deleted": deleted,
    "deleted twice": lambda output: (deleted(output), raised(delattr, output, "logits"))[1][0],
    "None": set_to(None),
    "a value": set_to(torch.ones(2)),
    "set by key": lambda output: (output.__setitem__("logits", torch.ones(2)), output.logits)[1],
    "popitem": lambda output: [output.popitem() for _ in range(2)],
    "popped from the front": lambda output: [output.popitem(last=False) for _ in range(2)],
    "pop": lambda output: raised(output.pop, "logits"),
    "setdefault": lambda output: raised(output.setdefault, "logits"),
    "update": lambda output: raised(output.update, {}),
    "delitem": lambda output: raised(output.__delitem__, "logits"),
    "clear": lambda output: (output.clear(), output.loss, output.logits, list(output))[1:],
    "keywords": lambda output: called_with(**output),
    "or": lambda output: output | {"more": 1},
    "ror": lambda output: {"more": 1} | output,
    "ior": with_in_place,
    "dict update": lambda output: (held := {}, held.update(output))[0],
    "OrderedDict": OrderedDict,
    "move_to_end": moved,
    "equal to itself": lambda output: (output == output, output != output),
    "equal to a copy": lambda output: output == copy.copy(output),
    "equal to a dict": lambda output: (output == 1, output != 1),
    "repr": lambda output: repr(output).startswith("CausalLMOutputWithPast(loss=tensor("),
    "reversed": lambda output: list(reversed(output)),
    "indices": lambda output: [output[0], output[:1], output[-2:], output[1:], output[::-1]],
    "wrong index": lambda output: raised(output.__getitem__, 9)[0],
    "wrong key": lambda output: raised(output.__getitem__, "scores")[0],
    "match": lambda output: [value for name in output if (value := getattr(output, name)) is not None],
    "sorted": lambda output: sorted(output),
    "leaves": lambda output: _pytree.tree_leaves(output),
    "leaves and paths": lambda output: [
        (_pytree.keystr(path), leaf) for path, leaf in _pytree.tree_flatten_with_path(output)[0]
    ],
    "mapped": lambda output: _pytree.tree_map(lambda x: x.detach() * 2, output),
    "mapped twice": lambda output: _pytree.tree_map(torch.add, *[_pytree.tree_map(lambda x: x, output)] * 2),
    "rebuilt": lambda output: _pytree.tree_unflatten(*reversed(_pytree.tree_flatten(output)[::-1])),
    "walked by accelerate": lambda output: recursively_apply(lambda x: x * 2, output),
    "accelerate's shapes": get_data_structure,
    "moved by accelerate": lambda output: send_to_device(output, "cpu"),
    "cast by accelerate": convert_to_fp32,
    "batch size": lambda output: raised(find_batch_size, output),
    "pickle": lambda output: pickle.loads(pickle.dumps(CausalLMOutputWithPast(**output))),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_output_is_what_upstreams_is(made, use):
    _, output, expected = made
    assert unread(output)
    assert_same(use(output), use(expected))
    assert_same({**output}, {**expected})
    assert_same(vars(output), vars(expected))
    assert type(output) is CausalLMOutputWithPast


FSDP_CASTS = as_library(
    "torch.distributed.fsdp.a_test",
    "def run(output):\n"
    "    return pytree.tree_map(lambda x: x.to(torch.float64) if isinstance(x, torch.Tensor) else x, output)",
)
MODULE_LOOKS = as_library(
    "torch.nn.modules.module",
    "def run(output):\n    return next(each for each in output.values() if isinstance(each, torch.Tensor))",
)

READING_NOTHING = {
    "loss": lambda output: output.loss,
    "loss by key": lambda output: output["loss"],
    "loss by index": lambda output: output[0],
    "another field": lambda output: output.hidden_states,
    "keys": lambda output: (list(output), list(output.keys()), "logits" in output, len(output)),
    "isinstance": lambda output: isinstance(output, CausalLMOutputWithPast | dict | OrderedDict),
    "FSDP: apply": lambda output: _apply_to_tensors(lambda x: x, output),
    "FSDP: cast": FSDP_CASTS,
    "DDP: find": lambda output: list(_find_tensors(output)),
    "hooks: find": MODULE_LOOKS,
    "accelerate: move": lambda output: send_to_device(output, "cpu"),
    "replace": lambda output: dataclasses.replace(output, loss=None),
    "deleted": lambda output: output.__delattr__("logits"),
}


@pytest.mark.parametrize("look", READING_NOTHING.values(), ids=READING_NOTHING)
def test_looking_elsewhere_computes_nothing(made, look):
    model, output, expected = made
    result = look(output)
    assert logits_are_read(model) is None
    if isinstance(result, LazyLogits):
        assert unread(result)
        assert list(result) == [name for name in expected if getattr(result, name) is not None]
        assert torch.equal(result.logits, expected.logits.to(result.logits.dtype))


def test_what_fsdp_casts_is_cast_when_it_is_read(made):
    _, output, expected = made
    cast = FSDP_CASTS(output)
    assert unread(cast) and cast.loss.dtype is torch.float64
    assert torch.equal(cast.logits, expected.logits.double())
    assert output.logits.dtype is torch.float32


def test_accelerates_mixed_precision_casts_what_is_unread(patched):
    upstream, model = pair(patched)
    inputs = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, output = upstream(**inputs), model(**inputs)
    converted = convert_to_fp32(output)
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
    with pytest.warns(VeomniHookWarning, match="weights") as warned:
        assert output.logits.sum()
    assert [each.filename for each in warned] == [__file__]  # computed once, for the line that reads


def test_logits_before_the_weights_changed_are_not(made):
    model, output, expected = made
    output.loss.backward()
    logits = output.logits
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(logits, expected.logits)


def test_a_model_whose_logits_are_read_computes_them_from_its_next_step_on(made):
    model, output, _ = made
    other = copy.deepcopy(model)
    assert isinstance(model(**batch()), LazyLogits)
    assert output.logits.sum()
    assert not isinstance(model(**batch()), LazyLogits)
    assert isinstance(other(**batch()), LazyLogits)


def test_the_line_that_reads_is_logged_once(made, caplog):
    model, output, _ = made
    line = inspect.currentframe().f_lineno + 1
    assert output["logits"].sum() == output.logits.sum()
    assert model(**batch()).logits.sum()
    (record,) = (one for one in caplog.records if "switched off" in one.getMessage())
    assert record.levelname == "WARNING" and record.name == "veomni_hook.kernels"
    assert f"the fused loss is switched off from the next step on, because outputs.logits is read at {__file__}:{line};" \
        in record.getMessage()  # fmt: skip
    assert record.getMessage().startswith(f"{type(model).__name__}: ")


def test_a_read_in_evaluation_switches_nothing_off(made, caplog):
    model, _, _ = made
    model.eval()
    assert model(**batch()).logits.sum()
    assert "switched off" not in caplog.text


def test_a_pickled_output_loads_without_this_package(made, tmp_path):
    _, output, _ = made
    path = tmp_path / "output.pickle"
    path.write_bytes(pickle.dumps(output))
    script = (
        "import pickle, sys; sys.modules['veomni_hook'] = None\n"
        f"output = pickle.load(open({str(path)!r}, 'rb'))\n"
        "print(type(output).__module__, tuple(output.logits.shape))"
    )
    printed, _ = outputs(started("-c", script, cwd=tmp_path))
    assert printed.split()[0] == "transformers.modeling_outputs"


#: Versions show the first alone.
CHANGES_IN_PLACE = {
    "hidden states": lambda model, output: held_logits(output)._hidden_states.detach().mul_(2),
    "fused AdamW": lambda model, _: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True).step(),
    "through data": lambda model, _: model.lm_head.weight.data.add_(1),
    "one number through data": lambda model, _: model.lm_head.weight.data[3, 5].add_(1),
}


@pytest.mark.parametrize("name", CHANGES_IN_PLACE)
def test_logits_after_a_change_in_place_are_a_warning(made, name):
    model, output, _ = made
    output.loss.backward()
    CHANGES_IN_PLACE[name](model, output)
    what = name if name == "hidden states" else "weights of the head"
    with pytest.warns(VeomniHookWarning, match=f"{what} have changed"):
        assert output.logits.sum()


def doubled(*given):
    return given[-1] * 2


def other_weight(model, *shape):
    model.lm_head.weight = nn.Parameter(torch.ones(*shape))


LATER = {
    "a hook": lambda model: model.lm_head.register_forward_hook(doubled),
    "a hook before": lambda model: model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "a global hook": lambda model: nn.modules.module.register_module_forward_hook(doubled),
    "a forward": lambda model: setattr(model.lm_head, "forward", doubled),
    "another head": lambda model: setattr(model, "lm_head", nn.Linear(32, 61)),
    "other data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 2),
    "a new Parameter": lambda model: other_weight(model, 61, 32),
    "another shape": lambda model: other_weight(model, 70, 32),
    "another dtype": lambda model: model.to(torch.bfloat16),
    "no device": lambda model: model.to("meta"),
    "eval": lambda model: model.eval(),
}


@pytest.mark.parametrize("change", LATER.values(), ids=LATER)
def test_what_comes_later_changes_no_logits(made, change):
    model, output, expected = made
    undo = change(model)
    try:
        assert torch.equal(output.logits, expected.logits)
    finally:
        if hasattr(undo, "remove"):
            undo.remove()


def test_gradients_of_logits_read_after_the_data_was_replaced(patched):
    gradients = []
    for model in pair(patched):
        output = model(**batch_of_zeros())
        logits = output.logits if not isinstance(output, LazyLogits) else None
        model.lm_head.weight.data = model.lm_head.weight.data * 2
        (output.logits if logits is None else logits).square().sum().backward()
        gradients.append(model.lm_head.weight.grad)
    close(*gradients, 1e-6)


def batch_of_zeros():
    ids = torch.zeros(2, 12, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def test_logits_of_a_functional_call_are_of_its_weights(patched):
    upstream, model = pair(patched)
    inputs = {**batch(), "use_cache": False}
    logits, gradients = [], []
    for each in (upstream, model):
        weights = {name: (weight.detach() * 1.5).requires_grad_() for name, weight in each.named_parameters()}
        output = torch.func.functional_call(each, weights, (), inputs)
        logits.append(output.logits)
        gradients.append(torch.autograd.grad(output.logits.square().sum(), weights["lm_head.weight"])[0])
    assert torch.equal(*logits)
    close(*gradients, 1e-6)


def test_a_head_that_draws_numbers_has_drawn_them_once(patched):
    _, model = with_decoder(pair(patched))
    model.lm_head.dense = nn.Sequential(model.lm_head.dense, nn.Dropout())
    inputs = batch()
    output = model(**inputs)
    assert unread(output)
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    loss = torch.nn.functional.cross_entropy(output.logits.transpose(1, 2), shifted)
    close(output.loss, loss, 1e-6)


def with_moving_hooks(model):
    """The head has hooks of accelerate, which may move its weights."""
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model.lm_head, hooks.ModelHook())
    return model


def test_weights_are_not_kept_for_hooks_that_move_them(patched):
    model = with_moving_hooks(pair(patched)[1])
    output = model(**batch())
    kept = gc.get_referrers(model.lm_head.weight)
    assert unread(output) and kept == [model.lm_head._parameters]
    assert output.logits.sum()


def test_hooks_of_others_beside_those_that_move_weights_are_a_warning(made):
    model = with_moving_hooks(made[0])
    output = model(**batch())
    model.lm_head.register_forward_hook(doubled)
    with pytest.warns(VeomniHookWarning, match=r"the head has a hook from .*test_output"):
        assert output.logits.sum()


def test_weights_of_another_dtype_that_hooks_have_moved_are_an_error(made):
    model = with_moving_hooks(made[0])
    output = model(**batch())
    model.to(torch.bfloat16)
    with pytest.raises(KernelError, match=r"different dtypes[^$]*read outputs.logits before"):
        _ = output.logits


def test_logits_of_a_head_that_was_moved_and_not_changed_are_no_warning(made):
    model, output, expected = made
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert torch.equal(output.logits, expected.logits)
