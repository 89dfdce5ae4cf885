"""Custom autograd functions without torch's Python code around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from veomni_hook.kernels.shared.autograd import applied, backward_once


class Scaled(torch.autograd.Function):
    """x * factor, whose backward is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    @backward_once
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy * ctx.factor, None


class Addressed(torch.autograd.Function):
    """Whether x has an address, which a kernel needs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(int(x.data_ptr() != 0))


scaled = applied(Scaled)


def test_computes_and_differentiates():
    x = torch.ones(3, requires_grad=True)
    y = scaled(x, 2.0)
    assert type(y.grad_fn).__name__ == "ScaledBackward"
    y.sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert not scaled(torch.ones(3), 2.0).requires_grad
    with torch.no_grad():
        assert not scaled(x, 2.0).requires_grad


def test_only_what_is_needed_of_torchs_code_runs(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("torch's Python code ran")

    monkeypatch.setattr(torch._functorch.utils, "unwrap_dead_wrappers", refuse)
    scaled(torch.ones(3, requires_grad=True), 2.0)


def test_a_second_derivative_is_an_error():
    x = torch.ones(3, requires_grad=True)
    (dx,) = torch.autograd.grad(scaled(x, 2.0).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


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
