"""Calls without gradients, which skip the dispatcher and autograd: equal results, and whoever watches sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from torch.nn import functional

from tests.kernels.nn_layer_norm.norms import of_tensors
from veomni_hook.kernels.add_rms_norm import triton as added
from veomni_hook.kernels.gated_mlp import triton as gated
from veomni_hook.kernels.layer_norm import module_calls as called
from veomni_hook.kernels.qk_norm_rotary import triton as qk
from veomni_hook.kernels.rms_norm import triton as norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-3


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, requires_grad=True)


def rms_norm() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    return lambda x, w: norms.cast_before_weight(x, w, EPS), [random(2, 3, 8), random(8)]


def add_rms_norm() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    run = added.kernel("cast_before_weight")
    return lambda x, y, w: run(x, y, w, EPS), [random(2, 3, 8), random(2, 3, 8), random(8)]


def layer_norm() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    return of_tensors(called.rounded_once, "weight and bias", 8), [random(2, 3, 8), random(8), random(8)]


def add_layer_norm() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    operands = [random(2, 3, 8), random(2, 3, 8), random(8), random(8)]
    return of_tensors(called.sum_rounded_once, "weight and bias", 8), operands


def qk_norm_rotary() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    run = qk.kernel("cast_before_weight_half_split")
    tables = [random(1, 3, 8).detach() for _ in "cs"]
    heads = [random(2, 3, 4, 8).transpose(1, 2), random(2, 3, 2, 8).transpose(1, 2), random(8), random(8)]
    return lambda q, k, qw, kw, c, s: run(q, k, qw, kw, EPS, EPS, c, s), [*heads, *tables]


def gated_mlp() -> tuple[Callable[..., Any], list[torch.Tensor]]:
    return lambda g, u: gated.product(g, u, functional.silu), [random(2, 3, 8), random(2, 3, 8)]


CASES = [rms_norm, add_rms_norm, layer_norm, add_layer_norm, qk_norm_rotary, gated_mlp]


def results(made: Any) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_equal_results_without_a_node(case, strided):
    run, operands = case()
    if strided:
        operands = [
            each.transpose(0, -2).contiguous().transpose(0, -2) if each.ndim > 2 else each
            for each in operands
        ]
    trained = results(run(*operands))
    assert all(each.requires_grad for each in trained)
    with torch.no_grad():
        inferred = results(run(*operands))
    frozen = results(run(*(each.detach() for each in operands)))
    with torch.inference_mode():
        last = results(run(*operands))
    for others in (inferred, frozen, last):
        for one, other in zip(trained, others, strict=True):
            assert other.grad_fn is None and not other.requires_grad
            assert torch.equal(one, other) and one.stride() == other.stride()


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_a_mode_sees_the_operator_and_changes_nothing(case, gradients):
    run, operands = case()
    with torch.set_grad_enabled(gradients):
        before = results(run(*operands))  # also makes what later calls reuse
        with Watching() as mode:
            watched = results(run(*operands))
        after = results(run(*operands))
    assert f"veomni_hook::{case.__name__}" in mode.seen
    for each in (watched, after):
        assert all(torch.equal(one, other) for one, other in zip(before, each, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_fake_tensors_after_real_ones(case):
    run, operands = case()
    with torch.no_grad():
        real = results(run(*operands))
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(each.detach()) for each in operands]
        with mode:
            fake = results(run(*fakes))
    assert [(each.shape, each.dtype, each.stride()) for each in fake] == [
        (each.shape, each.dtype, each.stride()) for each in real
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_other_strides_and_dtypes_get_plans_of_their_own(case):
    run, operands = case()
    with torch.no_grad():
        for change in (
            lambda x: x,
            lambda x: x.double().float(),
            lambda x: x.to(torch.bfloat16),
            lambda x: torch.stack([x, x], -1)[..., 0],
            lambda x: x[:1] if x.ndim > 2 else x,
        ):
            changed = [change(each.detach()) for each in operands]
            if change(torch.ones(2, 2, 2)).stride()[-1] != 1:  # weights stay contiguous
                changed = [each if each.ndim > 2 else each.contiguous() for each in changed]
            expected = results(run(*(each.contiguous() for each in changed)))
            for one, other in zip(expected, results(run(*changed)), strict=True):
                torch.testing.assert_close(one, other)
