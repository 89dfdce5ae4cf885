"""Modules that run on some positions at a time compute the same."""

import weakref

import pytest
import torch
from torch import nn

from tests.kernels.matching import close
from tests.memory.layers import WIDTH, Mlp, Stack, inputs, step
from veomni_hook.memory import checkpoint, parts, tiles


@tiles.by_position
class Tiled(Mlp):
    def forward(self, x):
        return super().forward(x)


@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setattr(tiles, "LEAST", 1)
    monkeypatch.setattr(tiles, "MULTIPLE", 1)
    parts.tell("tiles")
    yield
    parts.tell("")


@pytest.mark.parametrize("shape", [(2, 24), (1, 5), (3, 7)])
@pytest.mark.parametrize("setting", ["tiles", "tiles=5", "checkpoint,tiles", "checkpoint,offload,tiles"])
def test_loss_and_gradients(setting, shape):
    x = inputs(*shape)
    expected = step(Stack(), x)
    parts.tell(setting)
    found = step(
        Stack(mlp=Tiled), x, checkpoint.run if "checkpoint" in setting else lambda layer, x: layer(x)
    )
    close(found, expected, 1e-6)


def test_gradients_of_parameters_are_summed_in_float32():
    stack, tiled = Stack().bfloat16(), Stack(mlp=Tiled).bfloat16()
    parts.tell("tiles=1")
    x = inputs(4, 64).bfloat16()
    close(step(tiled, x), step(stack, x), 2e-2)


@pytest.mark.parametrize("frozen", ["x", "parameters", "bias", "x and parameters"])
@pytest.mark.parametrize("axes", [2, 3])
def test_what_needs_no_gradient_gets_none(frozen, axes):
    grads = []
    for kind in (Mlp, Tiled):
        torch.manual_seed(0)
        mlp, x = kind(), inputs()[0 if axes == 2 else ...].requires_grad_("x" not in frozen)
        for name, parameter in mlp.named_parameters():
            parameter.requires_grad_("parameters" not in frozen and not (frozen == "bias" and "bias" in name))
        y = mlp(x)
        if y.requires_grad:
            y.square().sum().backward()
        grads.append([y.detach(), x.grad, *(p.grad for p in mlp.parameters())])
    assert mlp.calls > 1
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b, 1e-6)


@pytest.mark.parametrize("setting", ["tiles", "checkpoint,tiles"])
def test_the_forward_runs_twice(setting):
    """Once more for the backward, also where a checkpoint recomputes the layer."""
    parts.tell(setting + "=8" if setting == "tiles" else "checkpoint,tiles=8")
    stack = Stack(1, mlp=Tiled)
    step(stack, inputs(2, 16), checkpoint.run if "checkpoint" in setting else lambda layer, x: layer(x))
    assert stack.layers[0].mlp.calls == 2 * 4


@tiles.by_position
class Ending(Mlp):
    """Counts the calls that came to their end."""

    ends = 0

    def forward(self, x):
        y = super().forward(x)
        self.ends += 1
        return y


@pytest.mark.parametrize("setting", ["tiles=8", "checkpoint,tiles=8"])
def test_the_last_product_is_computed_once(setting):
    parts.tell(setting)
    stack = Stack(1, mlp=Ending)
    step(stack, inputs(2, 16), checkpoint.run if "checkpoint" in setting else lambda layer, x: layer(x))
    assert (stack.layers[0].mlp.calls, stack.layers[0].mlp.ends) == (2 * 4, 4)


@tiles.by_position
class Noting(Mlp):
    """Notes the memory of its operands and results."""

    def forward(self, x):
        y = super().forward(x)
        self.noted = [*getattr(self, "noted", ()), *(weakref.ref(t.untyped_storage()) for t in (x, y))]
        return y


def test_the_graph_of_a_tile_holds_neither_x_nor_y():
    parts.tell("checkpoint,tiles=8")
    stack = Stack(1, mlp=Noting)
    loss = stack(inputs().requires_grad_(), checkpoint.run)
    assert [memory() for memory in stack.layers[0].mlp.noted] == [None] * 2 * 6
    loss.backward()


def test_a_graph_that_is_kept_is_used_twice():
    mlp, x = Tiled(), inputs().requires_grad_()
    loss = mlp(x).square().sum()
    once = torch.autograd.grad(loss, [x, *mlp.parameters()], retain_graph=True)
    twice = torch.autograd.grad(loss, [x, *mlp.parameters()])
    close(once, twice, 0)


@tiles.by_position
class Dropping(Mlp):
    """Drops by a function, which no module tells of."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.share = dropout

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), self.share)


@pytest.mark.parametrize("kind", [Tiled, Dropping])
@pytest.mark.parametrize("setting", ["tiles", "checkpoint,tiles"])
def test_random_numbers_are_those_of_the_forward(setting, kind):
    """By the derivative along a direction, which is linear in it: another mask would not give it."""
    parts.tell(setting)
    stack = Stack(1, dropout=0.5, mlp=kind).double()
    x, direction = inputs(dtype=torch.float64), 1e-6 * torch.randn(2, 24, WIDTH, dtype=torch.float64)
    run = checkpoint.run if "checkpoint" in setting else lambda layer, x: layer(x)
    torch.manual_seed(3)
    slope = step(stack, x, run)[1]
    losses = []
    for sign in (1, -1):
        torch.manual_seed(3)
        losses.append(stack(x + sign * direction).item())
    close(torch.tensor(losses[0] - losses[1]), 2 * (slope * direction).sum(), 1e-5)


@pytest.mark.parametrize("shape", [(1, 4, WIDTH), (4, WIDTH)])
def test_second_derivatives(shape):
    slopes = []
    for kind in (Mlp, Tiled):
        torch.manual_seed(0)
        mlp, x = kind(), inputs(1, 4).view(shape).requires_grad_()
        (first,) = torch.autograd.grad(mlp(x).pow(3).sum(), x, create_graph=True)
        slopes.append(torch.autograd.grad(first.square().sum(), [x, *mlp.parameters()]))
    assert mlp.calls > 1
    close(*slopes, 1e-5)


def test_random_numbers_of_a_recorded_backward_are_those_of_the_forward():
    slopes, mlp, x = [], Tiled(dropout=0.5), inputs().requires_grad_()
    for recorded in (False, True):
        torch.manual_seed(3)
        slopes.append(torch.autograd.grad(mlp(x).square().sum(), x, create_graph=recorded)[0])
    close(*slopes, 1e-6)


def test_autocast_is_that_of_the_forward():
    grads = []
    for kind in (Mlp, Tiled):
        torch.manual_seed(0)
        mlp, x = kind(), inputs().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = mlp(x)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        grads.append([x.grad, *(p.grad for p in mlp.parameters())])
    for a, b in zip(*grads, strict=True):
        assert a.dtype is torch.float32
        close(a, b, 2e-2)


def test_where_it_does_not_run_in_tiles():
    calls = []
    mlp = Tiled()
    with torch.no_grad():
        mlp(inputs())
    calls.append(mlp.calls)
    mlp.up.register_forward_hook(lambda *call: None)  # it would see each tile
    mlp(x=inputs())
    calls.append(mlp.calls)
    narrow = Tiled()
    narrow.up, narrow.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    narrow(inputs())
    Tiled()(inputs(1, 1))
    assert calls == [1, 2] and narrow.calls == 1
    parts.tell("")
    plain = Tiled()
    plain(inputs())
    assert plain.calls == 1


def test_tiles_of_long_sequences_do_not_grow():
    x, wide = (torch.empty(shape, device="meta") for shape in ((1, 100_000, WIDTH), (6 * WIDTH, WIDTH)))
    assert tiles._rows(x, [wide]) <= tiles.MOST
    assert tiles._rows(x[:, :12], [wide]) == 4  # three tiles, whose results are twice as large as x
