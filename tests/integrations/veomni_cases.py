"""VeOmni's slots as its generated modeling files use them: for each a function, its module and its inputs.

The code that runs with the slot bound to ``eager`` is the eager code of these files: what kernels are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

# Kernels of a GPU add up in another order than its libraries.
TOLERANCES = {torch.float32: 1e-4 if torch.cuda.is_available() else 2e-5, torch.bfloat16: 2e-2}
PLACES = [("veomni_hook_torch", "cpu")]
if torch.cuda.is_available():
    PLACES += [("veomni_hook_torch", "cuda"), ("veomni_hook_triton", "cuda")]
places = pytest.mark.parametrize(("name", "device"), PLACES)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
HIDDEN, INNER, EXPERTS, TOP_K, TOKENS = 32, 24, 4, 2, 21


class Case(NamedTuple):
    """A call: ``function(*inputs)``, with the gradients of ``module`` and of floating-point inputs."""

    slot: Any
    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    module: nn.Module | None = None


def generated(family: str, device: str = "gpu") -> Any:
    return import_module(f"veomni.models.transformers.{family}.generated.patched_modeling_{family}_{device}")


def filled(module: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    return module.to(device, dtype)


def states(*shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(device, dtype)


def of_module(slot: Any, module: nn.Module, device: str, dtype: torch.dtype, *more: Any) -> Case:
    x = states(TOKENS, HIDDEN, device=device, dtype=dtype)
    module = filled(module, device, dtype)
    return Case(slot, module, (x, *more), module)


def routed(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that tokens chose, and their weights; no token chose the last expert."""
    weights, index = torch.randn(TOKENS, EXPERTS - 1).softmax(-1).topk(TOP_K)
    return index.to(device), weights.to(device, dtype)


def tables(device: str, dtype: torch.dtype, width: int, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(*leading, width // 2).repeat(*[1] * len(leading), 2)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


CONFIG = SimpleNamespace(
    hidden_size=HIDDEN, intermediate_size=INNER, moe_intermediate_size=INNER, num_experts=EXPERTS, hidden_act="silu",
    num_local_experts=EXPERTS, swiglu_limit=0.5,
)  # fmt: skip


def rms_norm(device: str, dtype: torch.dtype) -> Case:
    home = generated("qwen3_moe")
    return of_module(home.veomni_rms_norm, home.Qwen3MoeRMSNorm(HIDDEN), device, dtype)


def one_plus_rms_norm(device: str, dtype: torch.dtype) -> Case:
    home = generated("qwen3_5")
    return of_module(home.veomni_rms_norm, home.Qwen3_5RMSNorm(HIDDEN), device, dtype)


def unweighted_rms_norm(device: str, dtype: torch.dtype) -> Case:
    home = generated("deepseek_v4")
    return of_module(home.veomni_unweighted_rms_norm, home.DeepseekV4UnweightedRMSNorm(), device, dtype)


def swiglu_mlp(device: str, dtype: torch.dtype) -> Case:
    home = generated("qwen3_moe")
    return of_module(home.veomni_swiglu_mlp, home.Qwen3MoeMLP(CONFIG), device, dtype)


def experts(device: str, dtype: torch.dtype) -> Case:
    home = generated("qwen3_moe")
    index, weights = routed(device, dtype)
    module = home.Qwen3MoeExperts(CONFIG)
    return of_module(home.veomni_moe_experts_forward, module, device, dtype, index, weights)


def biased_experts(device: str, dtype: torch.dtype) -> Case:
    home = generated("gpt_oss")
    index, weights = routed(device, dtype)
    return of_module(
        home.veomni_moe_experts_forward, home.GptOssExperts(CONFIG), device, dtype, index, weights
    )


def rotary(device: str, dtype: torch.dtype) -> Case:
    home = generated("qwen3_moe")
    q, k = (states(2, heads, 7, 16, device=device, dtype=dtype) for heads in (4, 2))
    return Case(
        home.veomni_apply_rotary_pos_emb, home.apply_rotary_pos_emb, (q, k, *tables(device, dtype, 16, 2, 7))
    )


def partial_rotary(device: str, dtype: torch.dtype) -> Case:
    home = generated("qwen3_5", "npu")
    q, k = (states(2, heads, 7, 16, device=device, dtype=dtype) for heads in (4, 2))
    return Case(
        home.veomni_apply_rotary_pos_emb, home.apply_rotary_pos_emb, (q, k, *tables(device, dtype, 8, 2, 7))
    )


def vision_rotary(device: str, dtype: torch.dtype) -> Case:
    home = generated("qwen3_vl")
    q, k = (states(9, 4, 16, device=device, dtype=dtype) for _ in range(2))
    return Case(
        home.veomni_apply_rotary_pos_emb_vision,
        home.apply_rotary_pos_emb_vision,
        (q, k, *tables(device, torch.float32, 16, 9)),
    )


CASES = (
    rms_norm, one_plus_rms_norm, unweighted_rms_norm, swiglu_mlp, experts, biased_experts, rotary, partial_rotary,
    vision_rotary,
)  # fmt: skip


def results(case: Case) -> list[torch.Tensor]:
    """Return the outputs of a call and every gradient, for incoming gradients that are the same each time."""
    inputs = [
        each.clone().requires_grad_() if number < leaves(case) and each.is_floating_point() else each
        for number, each in enumerate(case.inputs)
    ]
    if case.module is not None:
        case.module.zero_grad(set_to_none=True)
    made = case.function(*inputs)
    outputs = made if isinstance(made, tuple) else (made,)
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(each.shape, generator=generator).to(each) for each in outputs]
    torch.autograd.backward(outputs, incoming)
    return [*(each.detach() for each in outputs), *gradients(case, inputs)]


def leaves(case: Case) -> int:
    """How many inputs can want a gradient: tables of cosines and sines cannot."""
    return len(case.inputs) if case.module is not None else 2


def gradients(case: Case, inputs: list[Any]) -> Iterator[torch.Tensor]:
    wanted = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    if case.module is not None:
        wanted += case.module.parameters()
    for each in wanted:
        assert each.grad is not None
        yield each.grad


def far(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference of two lists, relative to the largest number of each tensor."""
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in expected]
    return max(
        ((one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-30)).item()
        for one, other in zip(found, expected, strict=True)
    )
