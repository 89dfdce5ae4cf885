"""Checkpointed layers whose inputs are on the host in between: the same bits, and a bound."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint as upstream
from torch.utils.checkpoint import noop_context_fn

from tests.kernels.dispatched import Operators
from tests.memory.layers import HEADS, Stack, inputs, step
from veomni_hook.errors import OffloadError, VeomniHookWarning
from veomni_hook.memory import attention, checkpoint, heads, host, offload, parts

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def told(monkeypatch):
    """Every tensor is moved, however small."""
    monkeypatch.setattr(offload, "LEAST", 1)
    monkeypatch.setattr(host, "BLOCK", 256)
    monkeypatch.setattr(offload, "BLOCK", 256)
    parts.tell("checkpoint,offload")
    yield
    parts.tell("")
    assert host.BLOCKS.held == 0


def kept_attention(stack, function=None):
    """Attention as upstream's models call it: what `get_interface` returns, with the module first."""
    for layer in stack.layers:
        layer.attention = _with_module(attention.kept(function or _sdpa), layer)
    return stack


def _sdpa(module, *operands, **named):
    return torch.nn.functional.scaled_dot_product_attention(*operands, **named)


def _with_module(implementation, module):
    return lambda *operands, **named: implementation(module, *operands, **named)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", ["checkpoint", "checkpoint,offload"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits(setting, dtype, device):
    stack, x = Stack().to(device, dtype), inputs().to(device, dtype)
    expected = step(stack, x)
    parts.tell(setting)
    for run in (checkpoint.run, checkpoint.run):
        found = step(kept_attention(stack), x, run)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("keeps", "calls"), [(True, 3), (False, 6)])
def test_attention_runs_once(keeps, calls):
    stack = Stack()
    stack = kept_attention(stack) if keeps else stack
    with Operators() as mode:
        step(stack, inputs(), checkpoint.run)
    assert sum("attention" in name and "backward" not in name for name in mode.names) == calls


@torch.library.custom_op("veomni_tests::dropping", mutates_args=())
def dropping(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention that draws random numbers, as fused kernels with dropout do."""
    return query * 1 + 0 * torch.rand_like(query)


dropping.register_autograd(lambda ctx, dy: (dy, torch.zeros_like(dy), torch.zeros_like(dy)))


def test_options_of_checkpoints_stay():
    assert (
        checkpoint.chosen(upstream)
        is checkpoint.chosen(partial(upstream, use_reentrant=True))
        is checkpoint.run
    )
    some = checkpoint.chosen(partial(upstream, use_reentrant=False, preserve_rng_state=False))
    assert (some.func, some.keywords) == (checkpoint.run, {"preserve_rng_state": False})
    stack, x = Stack(), inputs()
    for a, b in zip(step(stack, x, some), step(stack, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("own", [partial(upstream, context_fn=noop_context_fn), lambda layer, *x: layer(*x)])
def test_checkpoints_of_the_script_stay_with_a_warning(own):
    with pytest.warns(VeomniHookWarning, match="the script has its own checkpoints"):
        assert checkpoint.chosen(own) is own


@pytest.mark.parametrize("setting", ["checkpoint", "checkpoint,offload"])
def test_what_is_drawn_behind_attention_is_the_same_again(setting):
    parts.tell(setting)
    stack = kept_attention(Stack(2, dropout=0.5), lambda module, *heads, **named: dropping(*heads))
    x = inputs()
    torch.manual_seed(3)
    expected = step(stack, x)
    torch.manual_seed(3)
    found = step(stack, x, checkpoint.run)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@torch.library.custom_op("veomni_tests::rows_first", mutates_args=())
def rows_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of each position to itself, of ``[B, S, heads, D]``, as FlashAttention's operands are."""
    return q * k * v


def _slopes(ctx, dy):
    q, k, v = ctx.saved_tensors
    return dy * k * v, dy * q * v, dy * q * k


rows_first.register_autograd(
    _slopes, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def _turned(x):
    return x.transpose(1, 2)


#: Implementations of attention, and whether what their operators computed is their output.
IMPLEMENTATIONS = {
    "heads first": (lambda module, *qkv, **_: (_turned(_sdpa(module, *qkv)).contiguous(), None), True),
    "rows first": (lambda module, *qkv, **_: (rows_first(*map(_turned, qkv)), None), True),
    "changed": (lambda module, *qkv, **_: (2 * _turned(_sdpa(module, *qkv)), None), False),
}


@pytest.mark.parametrize("setting", ["checkpoint,tiles", "checkpoint,offload,tiles"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_outputs_of_some_heads_are_kept_once(name, setting, monkeypatch):
    implementation, is_output = IMPLEMENTATIONS[name]
    packed, calls = [], []

    def stack(function):
        stack = Stack()
        for layer in stack.layers:
            layer.attention = lambda *qkv, layer=layer, **_: _turned(function(layer, *qkv)[0])
        return stack

    def counted(*operands, **named):
        calls.append(operands[1].shape[1])
        return implementation(*operands, **named)

    def noted(pack):
        return lambda layer, tensor: packed.append(tensor.numel()) or pack(layer, tensor)

    monkeypatch.setattr(heads, "ROWS", 1)
    for kind in (offload.Layer, offload.Kept):
        monkeypatch.setattr(kind, "pack", noted(kind.pack))
    x = inputs()
    expected = step(stack(implementation), x)
    parts.tell(setting)
    found = step(stack(attention.kept(counted)), x, checkpoint.run)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert calls == [1] * 2 * 3 * HEADS
    # A layer's input is as large as all heads together.
    assert packed.count(x.numel()) - 3 * ("offload" in setting) == 3 * is_output
    assert packed.count(x.numel() // HEADS) == 3 * HEADS * (not is_output)


def test_embeddings_that_must_require_gradients_leave_the_device():
    stack, x = Stack(), inputs()
    expected = step(stack, x)
    embeddings = torch.nn.Identity()
    embeddings.register_forward_hook(checkpoint.entered(lambda module, operands, y: y.requires_grad_()))
    stack.zero_grad(set_to_none=True)
    y = embeddings(x.clone())
    assert y.requires_grad and not y.is_leaf
    y.retain_grad()
    loss = stack(y, checkpoint.run)
    loss.backward()
    for one, other in zip([loss, y.grad, *(p.grad for p in stack.parameters())], expected, strict=True):
        assert torch.equal(one, other)
    y = embeddings(x.clone())
    storage = weakref.ref(y.untyped_storage())
    loss = stack(y, checkpoint.run)
    del y
    assert storage() is None
    parts.tell("")
    assert embeddings(x.clone()).is_leaf


class Backward(torch.autograd.Function):
    """Notes when a backward passes."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.note()
        return dy, None


@pytest.mark.parametrize("has_attention", [True, False])
def test_what_a_layer_keeps_comes_back_behind_the_mlp_of_the_next_one(monkeypatch, has_attention):
    parts.tell("checkpoint,offload")
    stack, told = Stack(), []
    stack = kept_attention(stack) if has_attention else stack
    fetch = offload.Moved.fetch

    def noted(moved):
        if moved.tensor is None:
            told.append("fetch")
        fetch(moved)

    monkeypatch.setattr(offload.Moved, "fetch", noted)
    for number, layer in enumerate(stack.layers):
        note = partial(told.append, number)
        layer.mlp.register_forward_hook(lambda _, __, y, note=note: Backward.apply(y, note))
    step(stack, inputs(), checkpoint.run)
    before = told[: told.index(1)].count("fetch"), told[told.index(2) :].index("fetch")
    in_all = told.count("fetch")
    # Until the second layer's MLP: what the last two keep. Behind the last one's MLP: what the second keeps.
    assert before[0] <= 2 * in_all // 3 and before[1] > 0
    assert ("fetch" in told[told.index(2) : told.index(1)]) is has_attention


def test_inputs_come_back_first_and_what_attention_computed_with_the_layer():
    layer, behind = offload.Layer(1 << 30), offload.Layer(1 << 30)
    entered = layer.pack(inputs())
    layer.attend()
    computed = layer.pack(inputs())
    layer.leave()
    assert entered.tensor is None and computed.tensor is None
    behind.attended()
    assert entered.tensor is not None and computed.tensor is None
    layer.come()
    assert computed.tensor is not None


def test_blocks_of_page_locked_memory_are_counted_where_none_is_allocated():
    held = host.BLOCKS.held
    with host.BLOCKS.set_aside():
        blocks = host.BLOCKS.take(3 * host.BLOCK, most=3 * host.BLOCK, pinned=True)
        assert host.BLOCKS.held == 3 and all(block is host.NO_BLOCK for block in blocks)
        with pytest.raises(OffloadError):
            host.BLOCKS.take(1, most=3 * host.BLOCK, pinned=True)
        host.BLOCKS.give_back(blocks[:1])
        host.BLOCKS.take(1, most=3 * host.BLOCK, pinned=True)
    host.BLOCKS.give_back(blocks)
    assert host.BLOCKS.held == held and not any(block is host.NO_BLOCK for block in host.BLOCKS._free)


def test_host_memory_is_used_again_and_given_back():
    stack, x = kept_attention(Stack()), inputs()
    step(stack, x, checkpoint.run)
    held = host.BLOCKS.held
    assert held > 0
    for _ in range(20):
        step(stack, x, checkpoint.run)
    loss = stack(x.requires_grad_(), checkpoint.run)
    assert host.BLOCKS.held == held
    del loss  # a graph that no backward used
    gc.collect()
    assert len(host.BLOCKS._free) == held
    parts.tell("checkpoint")
    assert host.BLOCKS.held == 0


def test_a_graph_that_is_kept_is_used_twice():
    stack, x = kept_attention(Stack()), inputs().requires_grad_()
    loss = stack(x, checkpoint.run)
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in "12")
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad(Stack()(x), x)[0])


@pytest.mark.parametrize("layers", [1, 4])
def test_a_tensor_that_is_written_to_is_an_error(layers):
    """As without checkpoints: autograd's own check does not see tensors that hooks keep."""
    stack, x = Stack(layers), inputs().requires_grad_()
    before = x + 0

    def run(layer, x):
        y = checkpoint.run(layer, x)
        before.zero_()
        return y

    with pytest.raises(OffloadError, match=r"changed in place"):
        stack(before, run).backward()


@pytest.mark.parametrize("view", [lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x[::2]])
def test_strides_stay(view):
    layer = offload.Layer(0)
    x = view(inputs(rows=4))
    back = layer.unpack(layer.pack(x))
    assert torch.equal(back, x) and back.stride() == x.stride()


def test_a_full_host_is_an_error():
    parts.tell("checkpoint,offload=10000")
    with pytest.raises(OffloadError, match=r"more than 0\.0 GiB of host memory"):
        step(Stack(), inputs(), checkpoint.run)
    gc.collect()
    assert host.BLOCKS.held * host.BLOCK <= 10000 and len(host.BLOCKS._free) == host.BLOCKS.held


@pytest.mark.parametrize("back", [False, True])
def test_a_copy_that_fails_is_an_error(monkeypatch, back):
    copy = torch.Tensor.copy_

    def failing(self, source, non_blocking=False):
        if non_blocking:
            raise RuntimeError("no")
        return copy(self, source, non_blocking)

    stack, x = Stack(), inputs().requires_grad_()
    loss = stack(x, checkpoint.run) if back else None
    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    with pytest.raises(OffloadError, match="between cpu and the host failed"):
        (stack(x, checkpoint.run) if loss is None else loss).backward()


@pytest.mark.parametrize("setting", ["checkpoint", "checkpoint,offload"])
@pytest.mark.parametrize("least", [1, 1 << 30])
def test_nothing_stays_of_a_layer_whose_backward_is_done(monkeypatch, setting, least):
    """Without the garbage collector: autograd's nodes and what is kept make no circle."""
    monkeypatch.setattr(offload, "LEAST", least)
    parts.tell(setting)
    alive: list[weakref.ref] = []

    def noted(module, *operands, **named):
        alive.extend(weakref.ref(operand.untyped_storage()) for operand in operands)
        return _sdpa(module, *operands, **named)

    stack, x = kept_attention(Stack(), noted), inputs().requires_grad_()
    gc.disable()
    try:
        loss = stack(x, checkpoint.run)
        loss.backward()
        assert len(alive) == 2 * 3 * 3 and not any(reference() for reference in alive)
    finally:
        gc.enable()


def test_without_gradients_nothing_is_moved():
    with torch.no_grad():
        stack = Stack()
        assert torch.equal(stack(inputs(), checkpoint.run), stack(inputs()))
    assert host.BLOCKS.held == 0
