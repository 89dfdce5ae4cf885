"""A call of every op's kernels of the backend `npu`, forward and backward, at sizes of no importance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from tests.kernels import declared
from tests.kernels.contract import call_of
from tests.kernels.linear_cross_entropy.objectives import loss_of, operands
from tests.kernels.moe_experts.formulas import CASES, inputs
from veomni_hook.kernels.gated_mlp import npu as gated
from veomni_hook.kernels.linear_cross_entropy import npu as losses
from veomni_hook.kernels.linear_cross_entropy.objective import NOTHING, Objective
from veomni_hook.kernels.moe_router import npu as routers
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.varlen_attention import npu as segments


def _both_ways(function: Callable[..., Any], *operands: Any) -> None:
    given = [
        each.clone().requires_grad_() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in operands
    ]
    _backward(function(*given))


def _backward(made: Any) -> None:
    for each in made if isinstance(made, tuple) else (made,):
        if each.requires_grad:
            each.sum().backward(retain_graph=True)


def _variants(op: str) -> list[str]:
    return [k.variant for k in registry.kernels(op) if k.backend == "npu" and k.automatic]


def _of_cases(op: str, *size: Any) -> None:
    for variant in _variants(op):
        call = call_of(op, variant, "npu", *size)
        leaves = [x.requires_grad_(wanted) for x, wanted in zip(call.tensors, call.wanted, strict=True)]
        _backward(call.ours(*leaves))


def _gated_mlp() -> None:
    for variant, rest in {"product": (), "product_float32": (), "clamped": (0.5,)}.items():
        _both_ways(getattr(gated, variant), torch.randn(4, 6), torch.randn(4, 6), functional.silu, *rest)


def _moe_experts() -> None:
    for variant in (each for each in _variants("moe_experts") if each in CASES):
        case = CASES[variant]
        _both_ways(declared.kernel("moe_experts", variant, "npu"), *inputs(case), *case.rest)


def _moe_router() -> None:
    _both_ways(routers.softmax_topk, torch.randn(4, 6), 2, True)
    _both_ways(routers.topk_softmax, torch.randn(4, 6), 2)


def _linear_cross_entropy() -> None:
    given, target = operands(torch.bfloat16)
    _both_ways(loss_of(losses, target, Objective(), NOTHING), *given)


def _varlen_attention() -> None:
    ends = torch.tensor([0, 2, 5])
    query, key, value = (torch.randn(1, 4, 5, 8) for _ in range(3))
    _both_ways(lambda *given: segments.full(*given, ends, functional.relu, {}), query, key, value)


SAMPLES: dict[str, Callable[[], None]] = {
    "rms_norm": partial(_of_cases, "rms_norm", (4, 6), torch.bfloat16),
    "add_rms_norm": partial(_of_cases, "add_rms_norm", (4, 6)),
    "rotary": partial(_of_cases, "rotary"),
    "gated_mlp": _gated_mlp,
    "moe_experts": _moe_experts,
    "moe_router": _moe_router,
    "load_balancing_loss": lambda: None,
    "linear_cross_entropy": _linear_cross_entropy,
    "varlen_attention": _varlen_attention,
}
