"""One experts module on several ranks, called without a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.parallel.experts.models import COMMON, FAMILIES, OURS
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.parallel.expert_dispatch import OncePerRank
from veomni_hook.patches import expert_release

EXPERTS, HIDDEN = 8, COMMON["hidden_size"]
DISPATCHERS: dict[str, Any] = {"veomni": OncePerRank}
if expert_release.dispatches():
    from transformers.distributed.expert_parallel import AllToAllEP

    DISPATCHERS["all_to_all"] = AllToAllEP
_MESH: list[Any] = []


def meshes() -> tuple[Any, Any]:
    """The groups of experts (all ranks) and of tensor parallelism (each rank alone)."""
    if not _MESH:
        _MESH.append(init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp")))
    return _MESH[0]["ep"], _MESH[0]["tp"]


def whole(kind: str = "Qwen3Moe", implementation: str = "grouped_mm", **changes: Any) -> Any:
    """Return all experts, the same on every rank."""
    home, config = {"Qwen3Moe": (Qwen3MoeExperts, Qwen3MoeConfig), "GptOss": (GptOssExperts, GptOssConfig)}[
        kind
    ]
    config = config(**{**COMMON, **FAMILIES[kind], **changes})
    config._experts_implementation = implementation
    torch.manual_seed(0)
    experts = home(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def own(experts: Any, kind: str = "Qwen3Moe", implementation: str = "grouped_mm", **changes: Any) -> Any:
    """Return this rank's part of ``experts``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = whole(kind, implementation, **changes)
    part.num_experts = experts.num_experts // world
    part._is_expert_parallel = True
    for name, parameter in experts.named_parameters():
        held = parameter.detach().chunk(world)[rank].clone()
        part._parameters[name] = torch.nn.Parameter(held)
    return part


def routed(
    tokens: int, k: int, rank: int, experts: int = EXPERTS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, ids and weights of a rank's tokens."""
    seed = torch.Generator().manual_seed(17 + rank)
    x = torch.randn(tokens, HIDDEN, generator=seed)
    ids = torch.stack(
        [torch.randperm(experts, generator=seed)[:k] for _ in range(tokens)] or [torch.empty(0, k)]
    )
    return x, ids.reshape(-1, k).long(), torch.rand(tokens, k, generator=seed)


def compare(
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    dispatcher: str = "veomni",
    kernels: str = OURS,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, float]:
    """Return how far the dispatched experts of ``calls`` (one for each rank) are from all experts in one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    set_choice(kernels)
    experts = whole(**options)
    part = own(experts, **options).to(dtype)
    dispatch = DISPATCHERS[dispatcher](part, *meshes())
    x, ids, weights = calls[rank]
    x, weights = (each.to(dtype, copy=True).requires_grad_() for each in (x, weights))
    out = dispatch(x, ids, weights)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5 + rank)).to(dtype)
    out.backward(grad)
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    found |= {name: each.grad for name, each in part.named_parameters()}
    expected: dict[str, Any] = {}
    for number, (states, index, gates) in enumerate(calls):
        states, gates = states.clone().requires_grad_(), gates.clone().requires_grad_()
        result = by_loop(experts, states, index, gates)
        seed = torch.Generator().manual_seed(5 + number)
        result.backward(torch.randn(result.shape, generator=seed))
        if number == rank:
            expected |= {"out": result.detach(), "x": states.grad, "weights": gates.grad}
    expected |= {name: each.grad.chunk(world)[rank] for name, each in experts.named_parameters()}
    assert all(each is not None for each in found.values()), [name for name in found if found[name] is None]
    return {
        name: float((found[name] - of).abs().max() / of.abs().max().clamp(min=1e-6)) if of.numel() else 0.0
        for name, of in expected.items()
    }


def by_loop(experts: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition: for each pair with an expert, its result times its weight."""
    result = x * 0 + weights.sum() * 0 + sum(each.sum() * 0 for each in experts.parameters())
    for expert in range(experts.num_experts):
        for place in range(ids.shape[1]):
            rows = (ids[:, place] == expert).nonzero().flatten()
            if len(rows):
                y = _one(experts, expert, x[rows]) * weights[rows, place, None]
                result = result.index_add(0, rows, y)
    return result


def _one(experts: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
    if hasattr(experts, "gate_up_proj_bias"):
        products = rows @ up + experts.gate_up_proj_bias[expert]
        return experts._apply_gate(products) @ down + experts.down_proj_bias[expert]
    gate, linear = (rows @ up.t()).chunk(2, dim=-1)
    return (experts.act_fn(gate) * linear) @ down.t()
