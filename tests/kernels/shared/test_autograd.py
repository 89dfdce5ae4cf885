"""Custom autograd functions without torch's Python code around them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.shared.autograd import (
    applied,
    differentiable,
    differentiated_once,
    gradients,
    with_formula,
)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def _formula(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


class Addressed(torch.autograd.Function):
    """Whether x has an address, which a kernel needs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(int(x.data_ptr() != 0))


#: Its backward has no history of its own.
scaled = differentiable(
    _scaled, lambda saved, rest, wanted, dy: (dy.detach() * rest[0],), _formula, tensors=1
)


def test_computes_and_differentiates():
    x = torch.ones(3, requires_grad=True)
    y = scaled(x, 2.0)
    assert type(y.grad_fn).__name__ == "ScaledBackward"
    y.sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert not scaled(torch.ones(3), 2.0).requires_grad
    with torch.no_grad():
        assert not scaled(x, 2.0).requires_grad


def test_a_linear_op_keeps_no_operand_and_is_differentiated_again():
    scaled_by = differentiable(
        lambda x, weight: x * weight,
        lambda saved, rest, wanted, dy: (scaled_by(dy, saved[1]), None),
        None,
        tensors=2,
        unread=1,
    )
    x, weight = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    y = scaled_by(x, weight)
    assert [tensor is None for tensor in y.grad_fn.saved_tensors] == [True, False]
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(dx.sum(), x)[0].tolist() == [8.0] * 3


def test_only_what_is_needed_of_torchs_code_runs(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("torch's Python code ran")

    monkeypatch.setattr(torch._functorch.utils, "unwrap_dead_wrappers", refuse)
    assert scaled(torch.ones(3, requires_grad=True), 2.0).requires_grad


def test_a_recorded_backward_has_a_history():
    x = torch.ones(3, requires_grad=True)
    (dx,) = torch.autograd.grad(scaled(x, 2.0).pow(2).sum(), x, create_graph=True)
    (slope,) = torch.autograd.grad(dx.sum(), x)
    assert slope.tolist() == [8.0] * 3


def _damped(a, b, weight, rate, keep=True):
    total = a + b
    y = (-rate * total * weight).exp()
    return total, y, *((weight * rate,) if keep else ())


def _damped_gradients(saved, rest, wanted, dtotal, dy):
    total, _, y, slope = (x.detach() for x in saved)
    dy = torch.zeros_like(y) if dy is None else dy
    dx = -slope * y * dy
    return dx if dtotal is None else dx + dtotal, -rest[0] * total * y * dy


damped = differentiable(
    _damped, _damped_gradients, lambda total, weight, rate: (total, (-rate * total * weight).exp()),
    tensors=3, results=2, addends=2, reread=(1,), sparse=True, direct={"keep": False},
)  # fmt: skip


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
def test_addends_have_one_gradient_and_results_are_read_again(frozen, used, again):
    leaves = [torch.rand(4, dtype=torch.double, requires_grad=at != frozen) for at in range(3)]
    wanted = [x for x in leaves if x.requires_grad]

    def found(op):
        results = op(*leaves, 0.5)
        assert len(results) == 2
        slopes = torch.autograd.grad(
            sum(results[at].sin().sum() for at in used), wanted, create_graph=again, allow_unused=True
        )
        if not again:
            return slopes
        total = sum(slope.square().sum() for slope in slopes if slope is not None)
        return (*slopes, *torch.autograd.grad(total, wanted, allow_unused=True))

    for ours, theirs in zip(found(damped), found(lambda *call: _damped(*call)[:2]), strict=True):
        if theirs is None or ours is None:
            assert ours is theirs or not (ours if theirs is None else theirs).any()
        else:
            torch.testing.assert_close(ours, theirs)


def test_what_only_a_backward_reads_is_not_computed_without_gradients():
    assert len(damped(*torch.ones(3, 2), 0.5)) == 2
    with torch.no_grad():
        assert not damped(*torch.ones(3, 2, requires_grad=True), 0.5)[1].requires_grad


def test_gradients_of_operands_that_depend_on_each_other():
    def formula(x: torch.Tensor, w: torch.Tensor, factor: float, none: None) -> list[torch.Tensor | None]:
        return [factor * x * w, None, x.detach()]

    leaf = torch.tensor(3.0, requires_grad=True)
    x = leaf * leaf
    incoming = torch.tensor(1.0), torch.tensor(1.0), None
    for again in (False, True):
        with torch.set_grad_enabled(again):
            found = gradients(formula, (x, leaf, 2.0, None), (True, True, False, False), incoming)
        assert found[2:] == (None, None)
        assert [float(dx) for dx in found[:2]] == [6.0, 18.0]
        assert found[0].requires_grad is again
    # d(2 w) / d leaf, and d(2 x) / d leaf
    assert [float(torch.autograd.grad(dx, leaf, retain_graph=True)[0]) for dx in found[:2]] == [2.0, 12.0]


def test_gradients_of_what_does_not_matter():
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert gradients(lambda x, w: x * 2, (x, w), (True, True), (torch.ones(2),))[1] is None
    assert gradients(lambda x, w: x * w, (x, w), (False, False), (torch.ones(2),)) == (None, None)
    assert gradients(lambda x, w: x * w, (x, w), (True, True), (None,)) == (None, None)


def test_code_that_is_differentiable_once_says_so_at_the_first_recorded_backward():
    x = torch.ones(3, requires_grad=True)
    y = differentiated_once("gated_mlp=liger", x * x)
    assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].tolist() == [2.0] * 3
    with pytest.raises(KernelError, match=r"create_graph=True\n.*gated_mlp=liger\n.*choose gated_mlp=eager"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert not differentiated_once("gated_mlp=liger", torch.ones(3)).requires_grad


def test_what_auto_takes_is_differentiated_twice():
    modules = {kernel.load.partition(":")[0] for kernel in registry.kernels() if kernel.automatic}
    sources = {name: Path(importlib.util.find_spec(name).origin).read_text("utf-8") for name in modules}
    assert not [name for name, source in sources.items() if "differentiated_once" in source]


class CubedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x**3 * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, incoming):
        x, scale = ctx.saved_tensors
        return 3 * x**2 * scale * incoming, (x**3 * incoming).sum()


def test_code_that_is_differentiable_once_with_its_formula():
    leaf = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    read = torch.tensor(2.0, dtype=torch.float64)

    def ours(leaf):
        x = leaf.sin()
        return with_formula(
            CubedOnce.apply, lambda x, scale, read: x**3 * scale * read / 2, (x, x.sum()), read
        )

    def plain(leaf):
        return leaf.sin() ** 3 * leaf.sin().sum()

    for create_graph in (False, True):
        (one,) = torch.autograd.grad(ours(leaf).sum(), leaf, create_graph=create_graph)
        (other,) = torch.autograd.grad(plain(leaf).sum(), leaf, create_graph=create_graph)
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(torch.autograd.grad(one.sum(), leaf), torch.autograd.grad(other.sum(), leaf))
    assert torch.autograd.gradcheck(ours, leaf) and torch.autograd.gradgradcheck(ours, leaf)
    assert not with_formula(torch.mul, torch.mul, (read, read)).requires_grad


def test_a_tensor_that_left_a_transform():
    left = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        left.append(x)
        return x.sum()

    torch.func.grad(loss)(torch.ones(3))
    assert torch._C._functorch.is_functorch_wrapped_tensor(left[0])
    assert applied(Addressed)(left[0]) == torch.tensor(1)


def test_a_transform_says_what_it_lacks():
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: scaled(x, 2.0).sum())(torch.ones(3))


def test_is_compiled_into_one_graph():
    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda x: scaled(x, 2.0) + 1, backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    assert y.tolist() == [3.0] * 3
    assert x.grad.tolist() == [2.0] * 3
