"""Experts by definition: one function a variant, which is its oracle and its backend ``reference``.

The functions named ``*_expert`` hold the formula of one expert with its casts; their source text is also what
the recogniser compares upstream code with (`veomni_hook.patches.idioms.moe_experts.find`).

Shapes, where nothing else is said: ``hidden_states`` [tokens, hidden], ``top_k_index`` and ``top_k_weights``
[tokens, k], weights stacked over experts: ``gate_up_proj`` [E, 2I, H] (gate first), ``down_proj`` [E, H, I].
An id that no expert has, like the sentinel E of expert parallelism, adds nothing. The result has the shape
and dtype of ``hidden_states``.
"""

# ruff: noqa: D103 - a formula has the operands that it has, and its text says what it is
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def gated(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the sum over k of ``w_k * down(act(gate) * up)``."""
    expert = partial(gated_expert, act_fn=act_fn)
    return _through_experts(hidden_states, top_k_index, top_k_weights, expert, (gate_up_proj, down_proj))


def gated_expert(
    states: Tensor, routing: Tensor, gate_up_proj: Tensor, down_proj: Tensor, act_fn: Any
) -> Any:
    gate, up = functional.linear(states, gate_up_proj).chunk(2, dim=-1)
    return functional.linear(act_fn(gate) * up, down_proj) * routing


def gated_clamped(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
    limit: float,
) -> Tensor:
    """`gated` with gate at most ``limit`` and up within ``±limit``, both before the activation."""
    expert = partial(gated_clamped_expert, act_fn=act_fn, limit=limit)
    return _through_experts(hidden_states, top_k_index, top_k_weights, expert, (gate_up_proj, down_proj))


def gated_clamped_expert(
    states: Tensor, routing: Tensor, gate_up_proj: Tensor, down_proj: Tensor, act_fn: Any, limit: Any
) -> Any:
    gate, up = functional.linear(states, gate_up_proj).chunk(2, dim=-1)
    product = act_fn(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
    return functional.linear(product, down_proj) * routing


def gated_clamped_after(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
    limit: float,
) -> Tensor:
    """`gated` with the activated gate at most ``limit`` and up within ``±limit``."""
    expert = partial(gated_clamped_after_expert, act_fn=act_fn, limit=limit)
    return _through_experts(hidden_states, top_k_index, top_k_weights, expert, (gate_up_proj, down_proj))


def gated_clamped_after_expert(
    states: Tensor, routing: Tensor, gate_up_proj: Tensor, down_proj: Tensor, act_fn: Any, limit: Any
) -> Any:
    gate, up = functional.linear(states, gate_up_proj).chunk(2, dim=-1)
    product = act_fn(gate).clamp(max=limit) * up.clamp(min=-limit, max=limit)
    return functional.linear(product, down_proj) * routing


def gated_float32_product(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
) -> Tensor:
    """`gated` with activation and product in float32."""
    expert = partial(gated_float32_product_expert, act_fn=act_fn)
    return _through_experts(hidden_states, top_k_index, top_k_weights, expert, (gate_up_proj, down_proj))


def gated_float32_product_expert(
    states: Tensor, routing: Tensor, gate_up_proj: Tensor, down_proj: Tensor, act_fn: Any
) -> Any:
    gate, up = functional.linear(states, gate_up_proj).chunk(2, dim=-1)
    product = (act_fn(gate.float()) * up.float()).to(gate.dtype)
    return functional.linear(product, down_proj) * routing


def gated_jointly(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the sum over k of ``w_k * down(act(gate, up))``, added up in float32."""
    expert = partial(gated_jointly_expert, act_fn=act_fn)
    weights = (gate_up_proj, down_proj)
    return _through_experts(
        hidden_states, top_k_index, top_k_weights, expert, weights, dtype=torch.float32
    ).to(hidden_states.dtype)


def gated_jointly_expert(
    states: Tensor, routing: Tensor, gate_up_proj: Tensor, down_proj: Tensor, act_fn: Any
) -> Any:
    gate, up = functional.linear(states, gate_up_proj).chunk(2, dim=-1)
    return functional.linear(act_fn(gate, up), down_proj) * routing


def gated_normalised(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
    norm: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the sum over k of ``w_k * norm(down(act(gate) * up))``."""
    expert = partial(gated_normalised_expert, act_fn=act_fn, norm=norm)
    return _through_experts(hidden_states, top_k_index, top_k_weights, expert, (gate_up_proj, down_proj))


def gated_normalised_expert(
    states: Tensor, routing: Tensor, gate_up_proj: Tensor, down_proj: Tensor, act_fn: Any, norm: Any
) -> Any:
    gate, up = functional.linear(states, gate_up_proj).chunk(2, dim=-1)
    return norm(functional.linear(act_fn(gate) * up, down_proj)) * routing


def gated_transposed(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
) -> Tensor:
    """`gated` with ``gate_up_proj`` [E, H, 2I] and ``down_proj`` [E, I, H]."""
    expert = partial(gated_transposed_expert, act_fn=act_fn)
    return _through_experts(hidden_states, top_k_index, top_k_weights, expert, (gate_up_proj, down_proj))


def gated_transposed_expert(
    states: Tensor, routing: Tensor, gate_up_proj: Tensor, down_proj: Tensor, act_fn: Any
) -> Any:
    gate, up = (states @ gate_up_proj).chunk(2, dim=-1)
    return (act_fn(gate) * up) @ down_proj * routing


def alpha_gated(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """Return the sum over k of ``w_k * down((up + 1) * gate * sigmoid(alpha * gate))``, both clamped."""
    expert = partial(alpha_gated_expert, alpha=alpha, limit=limit)
    return _through_experts(hidden_states, top_k_index, top_k_weights, expert, (gate_up_proj, down_proj))


def alpha_gated_expert(
    states: Tensor, routing: Tensor, gate_up_proj: Tensor, down_proj: Tensor, alpha: Any, limit: Any
) -> Any:
    gate, up = functional.linear(states, gate_up_proj).chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return functional.linear((up + 1) * (gate * torch.sigmoid(gate * alpha)), down_proj) * routing


def biased_interleaved_alpha_gated(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    gate_up_bias: Tensor,
    down_proj: Tensor,
    down_bias: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """`alpha_gated` with biases; ``gate_up_proj`` [E, H, 2I], gate in its even columns.

    ``down_proj`` is [E, I, H], the biases are [E, 2I] and [E, H].
    """
    expert = partial(biased_interleaved_alpha_gated_expert, alpha=alpha, limit=limit)
    weights = (gate_up_proj, gate_up_bias, down_proj, down_bias)
    return _through_experts(hidden_states, top_k_index, top_k_weights, expert, weights)


def biased_interleaved_alpha_gated_expert(
    states: Tensor,
    routing: Tensor,
    gate_up_proj: Tensor,
    gate_up_bias: Tensor,
    down_proj: Tensor,
    down_bias: Tensor,
    alpha: Any,
    limit: Any,
) -> Any:
    gate_up = states @ gate_up_proj + gate_up_bias
    gate = gate_up[..., ::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(min=-limit, max=limit)
    product = (up + 1) * (gate * torch.sigmoid(gate * alpha))
    return (product @ down_proj + down_bias) * routing


def biased_alpha_gated_float32(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    gate_up_bias: Tensor,
    down_proj: Tensor,
    down_bias: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """`alpha_gated` with biases, all in float32; ``gate_up_proj`` [E, H, 2I], gate in its first half.

    ``down_proj`` is [E, I, H], the biases are [E, 2I] and [E, H].
    """
    expert = partial(biased_alpha_gated_float32_expert, alpha=alpha, limit=limit)
    weights = (gate_up_proj, gate_up_bias, down_proj, down_bias)
    return _through_experts(
        hidden_states, top_k_index, top_k_weights, expert, weights, dtype=torch.float32
    ).to(hidden_states.dtype)


def biased_alpha_gated_float32_expert(
    states: Tensor,
    routing: Tensor,
    gate_up_proj: Tensor,
    gate_up_bias: Tensor,
    down_proj: Tensor,
    down_bias: Tensor,
    alpha: Any,
    limit: Any,
) -> Any:
    gate_up = states.float() @ gate_up_proj.float() + gate_up_bias.float()
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    product = (up + 1) * (gate * torch.sigmoid(gate * alpha))
    return (product.float() @ down_proj.float() + down_bias.float()) * routing.float()


def ungated(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the sum over k of ``w_k * down(act(up))``, added up in the dtype of the routing weights."""
    expert = partial(ungated_expert, act_fn=act_fn)
    weights = (up_proj, down_proj)
    return _through_experts(
        hidden_states, top_k_index, top_k_weights, expert, weights, dtype=top_k_weights.dtype
    ).to(hidden_states.dtype)


def ungated_expert(states: Tensor, routing: Tensor, up_proj: Tensor, down_proj: Tensor, act_fn: Any) -> Any:
    return functional.linear(act_fn(functional.linear(states, up_proj)), down_proj) * routing


def gated_or_identity(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor | None,
    down_proj: Tensor | None,
    act_fn: Callable[[Tensor], Tensor],
    num_experts: int,
    identity: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`gated` for ids below ``num_experts``; every other id is an expert that returns what it gets.

    Without weights all of them are. ``identity`` is the module that upstream calls for these, if any.
    """
    result = torch.zeros_like(hidden_states)
    for index in torch.unique(top_k_index).tolist():
        expert: Callable[..., Tensor] = identity_expert
        if identity is not None:
            expert = partial(module_expert, module=identity)
        if index < num_experts and gate_up_proj is not None and down_proj is not None:
            weights = [gate_up_proj[index], down_proj[index]]
            expert = partial(_of_one_expert, partial(gated_expert, act_fn=act_fn), weights)
        _add_rows(result, hidden_states, top_k_weights, top_k_index == index, expert)
    return result


def identity_expert(states: Tensor, routing: Tensor) -> Any:
    return states * routing


def modules(
    hidden_states: Tensor, expert_mask: Tensor, routing_weights: Tensor, experts: Iterable[Any]
) -> Tensor:
    """Return the sum over k of ``w_k * expert(hidden_states)``, each expert a module.

    ``expert_mask`` [tokens, k, E] says who goes where; a token of no expert gets zero.
    """
    result = torch.zeros_like(hidden_states)
    for index, module in zip(range(expert_mask.shape[-1]), experts, strict=False):
        expert = partial(module_expert, module=module)
        _add_rows(result, hidden_states, routing_weights, expert_mask[..., index] > 0, expert)
    return result


def module_expert(states: Tensor, routing: Tensor, module: Any) -> Any:
    return module(states) * routing


def batched_gated(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
    hidden_size: int,
) -> Tensor:
    """Every expert on its own equal share of the rows of ``hidden_states`` [E * tokens, H].

    ``gate_up_proj`` is [E, H, 2I], ``down_proj`` [E, I, H].
    """
    hidden_states = hidden_states.view(gate_up_proj.shape[0], -1, hidden_size)
    gate, up = torch.bmm(hidden_states, gate_up_proj).chunk(2, dim=-1)
    return torch.bmm(up * act_fn(gate), down_proj).view(-1, hidden_size)


def shared_gated(
    hidden_states: Tensor,
    routing_weights: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
    act_fn: Callable[[Tensor], Tensor],
    num_experts: int,
) -> Tensor:
    """Every token through all experts: the sum over e of ``down(w_e * act(gate) * up)``, in float32.

    ``hidden_states`` is [..., H], ``routing_weights`` [..., E]; ``gate_proj`` and ``up_proj`` are [E, I, H].
    """
    shape = hidden_states.shape
    rows = hidden_states.reshape(1, -1, shape[-1]).expand(num_experts, -1, -1)
    weights = routing_weights.reshape(-1, num_experts, 1).transpose(0, 1)
    gate, up = torch.bmm(rows, gate_proj.transpose(1, 2)), torch.bmm(rows, up_proj.transpose(1, 2))
    result = torch.bmm(act_fn(gate) * up * weights, down_proj.transpose(1, 2))
    return result.float().sum(dim=0).to(hidden_states.dtype).view(shape)


def grouped_linear(inputs: Tensor, expert_size: Any, weight: Tensor) -> Tensor:
    """Rows sorted by expert, ``expert_size`` of them to each: ``x W_e^T`` with ``weight`` [E, out, in]."""
    rows = torch.split(inputs, expert_size, dim=0)
    return torch.cat([functional.linear(*pair) for pair in zip(rows, weight, strict=True)], dim=0)


def _through_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    expert: Callable[..., Tensor],
    weights: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Add up ``expert(states, routing, *its weights)`` in ``dtype`` (None: that of ``hidden_states``)."""
    result = torch.zeros_like(hidden_states, dtype=dtype)
    for index in range(len(weights[0])):
        rows = partial(_of_one_expert, expert, [weight[index] for weight in weights])
        _add_rows(result, hidden_states, top_k_weights, top_k_index == index, rows)
    return result


def _of_one_expert(
    expert: Callable[..., Tensor], weights: Sequence[Tensor], states: Tensor, routing: Tensor
) -> Tensor:
    return expert(states, routing, *weights)


def _add_rows(
    result: Tensor,
    hidden_states: Tensor,
    top_k_weights: Tensor,
    chosen: Tensor,
    expert: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Add one expert's results for the places ``chosen`` [tokens, k] to ``result``, in place."""
    # Of tokens that have the expert twice, the results are added in the order of their places.
    place, token = torch.where(chosen.t())
    if token.numel():
        rows = expert(hidden_states[token], top_k_weights[token, place, None])
        result.index_add_(0, token, rows.to(result.dtype))
