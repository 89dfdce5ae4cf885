"""Products that a projection does not keep: through the interpreter on a CPU, compiled on a GPU."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.kernels import declared
from tests.kernels.matching import DEVICE, close, results

pytest.importorskip("triton")

from veomni_hook.kernels.gated_mlp import recomputed, widths
from veomni_hook.kernels.gated_mlp import triton as kernels
from veomni_hook.kernels.gated_mlp.recomputed import Product

VARIANTS = {
    "product": (functional.silu,),
    "product_float32": (functional.silu,),
    "clamped": (functional.silu, 0.75),
    "clamped_after": (functional.silu, 0.5),
    "scaled_sigmoid": (1.702, 1.5),
}


class Mlp(nn.Module):
    """Projections around a gated product."""

    def __init__(self, gated, bias=False):
        super().__init__()
        self.gate, self.up = (nn.Linear(6, 10, bias=bias) for _ in "gu")
        self.down = nn.Linear(10, 6, bias=bias)
        self.gated = gated

    def forward(self, x):
        return self.down(self.gated(self.gate(x), self.up(x)))


def pair(variant="product", *, bias=False):
    """The MLP with our kernel, and with the formula, of equal weights."""
    rest = VARIANTS[variant]
    sides = (lambda g, u, f=f: f(g, u, *rest) for f in declared.pair("gated_mlp", variant, "triton"))
    ours, theirs = (Mlp(gated, bias).to(DEVICE) for gated in sides)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def same(ours, theirs, x, **options):
    close(results(ours, x, **options), results(theirs, x), 1e-5)


def kept(mlp, x):
    """The sizes of what a forward keeps for its backward, each storage once."""
    found = {}

    def note(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = mlp(x)
    del y
    return list(found.values())


@pytest.fixture
def x():
    return torch.randn(3, 5, 6, device=DEVICE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_formula(variant, bias, x):
    same(*pair(variant, bias=bias), x)


@pytest.mark.parametrize("frozen", ["", "down", "gate up"])
def test_a_width_that_is_no_multiple_of_8_is_padded(frozen, x, monkeypatch):
    found = []

    def pad(tensor, sizes, value=0.0):
        found.append(tensor.shape[-1] + sum(sizes))
        return torch.nn.functional.pad(tensor, sizes, value=value)

    monkeypatch.setattr(recomputed, "missing", lambda product, width: -width % 8)
    monkeypatch.setattr(widths, "functional", SimpleNamespace(pad=pad))
    models = pair(bias=True)
    for model in models:
        for name in frozen.split():
            getattr(model, name).requires_grad_(requires_grad=False)
    same(*models, x)
    assert set(found) == {16} and len(found) == (3 if frozen == "down" else 4)


def test_the_product_is_not_kept(x):
    ours, theirs = pair()
    assert kept(theirs, x).count(3 * 5 * 10) == 4  # gate, up, activation, product
    assert kept(ours, x).count(3 * 5 * 10) == 2


@pytest.mark.parametrize("frozen", ["down", "gate", "up", "gate up", "gate up down"])
def test_frozen_projections(frozen, x):
    models = pair(bias=True)
    for model in models:
        for name in frozen.split():
            getattr(model, name).requires_grad_(requires_grad=False)
    same(*models, x)


def test_only_the_weight_wants_a_gradient(x):
    models = pair()
    found = []
    for model in models:
        gate, up = (layer(x).detach() for layer in (model.gate, model.up))
        up.requires_grad_()
        y = model.down(model.gated(gate, up))
        found.append(torch.autograd.grad(y.sum(), [model.down.weight, up]))
    close(found[0][0], found[1][0], 1e-5)
    close(found[0][1], found[1][1], 1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(reentrant, x):
    same(*pair(), x, run=lambda mlp, x: checkpoint(mlp, x, use_reentrant=reentrant))


def written(monkeypatch):
    """A function that says, and forgets, for how many results memory was allocated."""
    allocated, like = [], kernels._like

    def noted(tensor):
        allocated.append(tensor.shape)
        return like(tensor)

    monkeypatch.setattr(kernels, "_like", noted)
    return lambda: len([allocated.pop() for _ in range(len(allocated))])


@pytest.mark.parametrize("reentrant", [True, False, None])
def test_gradients_take_the_place_of_what_a_checkpoint_recomputed(reentrant, x, monkeypatch):
    allocated = written(monkeypatch)
    model, _ = pair()
    x = x.requires_grad_()
    y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
    assert allocated() == 1
    y.square().sum().backward()
    # The product is recomputed where dy was. The others are in a graph, but for a recomputation of their own.
    assert allocated() == {None: 2, True: 3, False: 1}[reentrant]


@pytest.mark.parametrize("keeps", ["a hook", "a view", "a graph"])
def test_what_somebody_keeps_is_not_written_to(keeps, x, monkeypatch):
    kept = []
    ways = {
        "a hook": lambda _, __, y: kept.append(y),
        "a view": lambda _, __, y: kept.append(y.detach()[0]),
        "a graph": lambda _, __, y: kept.append(y.sin()),
    }
    model, theirs = pair()
    model.gate.register_forward_hook(ways[keeps])
    allocated = written(monkeypatch)
    same(
        model,
        theirs,
        x,
        run=lambda mlp, x: checkpoint(mlp, x, use_reentrant=False) if mlp is model else mlp(x),
    )
    assert allocated() == 1 + 1 + 2
    gate = model.gate(x).detach()
    expected = {"a hook": gate, "a view": gate[0], "a graph": gate.sin()}[keeps]
    assert len(kept) >= 2
    for tensor in kept:
        close(tensor.detach(), expected, 1e-6)


def test_a_graph_that_is_kept_is_used_twice(x):
    model, _ = pair()
    y = checkpoint(model, x.requires_grad_(), use_reentrant=False).sin().sum()
    first, second = (torch.autograd.grad(y, [x, *model.parameters()], retain_graph=True) for _ in "12")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_hooks_see_a_tensor_and_may_replace_it(x):
    ours, theirs = pair()
    seen = []
    for model in (ours, theirs):
        model.down.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
        model.down.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    same(ours, theirs, x)
    assert seen == [(3, 5, 10)] * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y * 2,
        lambda y: y.mul_(2),
        lambda y: functional.dropout(y, 0.0),
        lambda y: y.flatten(0, 1).unflatten(0, (3, 5)),
        lambda y: torch.cat([y, y])[:3],
        lambda y: y.float(),
    ],
    ids=["times", "in place", "dropout", "views", "cat", "float"],
)
def test_whatever_else_is_done_to_it(change, x):
    ours, theirs = pair()
    for model in (ours, theirs):
        model.gated = lambda g, u, gated=model.gated: change(gated(g, u))
    same(ours, theirs, x)


def test_what_comes_of_it_is_plain(x):
    gate, up = (torch.randn(2, 4, device=DEVICE, requires_grad=True) for _ in "gu")
    y = kernels.product(gate, up, functional.silu)
    assert type(y) is Product and y.requires_grad and y.shape == (2, 4)
    assert {type(z) for z in (y + 1, y.detach(), y[0], y.view(8), y.clone())} == {torch.Tensor}
    assert type(functional.linear(y, torch.ones(3, 4, device=DEVICE))) is torch.Tensor
    assert type(copy.deepcopy(y.detach())) is torch.Tensor
    with torch.no_grad():
        assert type(kernels.product(gate, up, functional.silu)) is torch.Tensor


class Doubling(torch.Tensor):
    """A weight that computes linear in a way of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return 2 * func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_weight_of_another_kind_has_its_say(x):
    ours, theirs = pair()
    for model in (ours, theirs):
        weight = model.down.weight.detach().as_subclass(Doubling)
        del model.down.weight
        model.down.weight = weight
    same(ours, theirs, x)


def test_autocast(x):
    found = []
    for model in pair():
        with torch.autocast(DEVICE, torch.bfloat16):
            found.append(results(model, x))
    close(*found, 3e-2)


def test_a_norm_between_reads_it_like_any_other(x):
    from veomni_hook.kernels.rms_norm import reference as norms
    from veomni_hook.kernels.rms_norm import triton as fused

    weight = torch.rand(10, device=DEVICE)
    ours, theirs = pair()
    for model, module in ((ours, fused), (theirs, norms)):
        assert fused.refuses(None, model.gated(model.gate(x), model.up(x)), weight, 1e-6) is None
        model.gated = lambda g, u, gated=model.gated, module=module: module.cast_before_weight(
            gated(g, u), weight, 1e-6
        )
    same(ours, theirs, x)
