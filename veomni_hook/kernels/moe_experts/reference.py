"""Experts by definition: the oracle of every variant, and its backend ``reference``.

`expert` has the formula of one expert with its casts, for every `Layout`; its source text is also what the
recogniser compares upstream code with (`veomni_hook.patches.idioms.moe_experts.find`), which follows it for
one layout after the other.

Shapes, where nothing else is said: ``hidden_states`` [tokens, hidden], ``top_k_index`` and ``top_k_weights``
[tokens, k], weights stacked over experts: ``gate_up_proj`` [E, 2I, H] (gate first; [E, I, H] without gate),
``down_proj`` [E, H, I], both transposed if the layout says so, biases [E, 2I] and [E, H].
An id that no expert has, like the sentinel E of expert parallelism, adds nothing. The result has the shape
and dtype of ``hidden_states``.
"""

# ruff: noqa: D103 - a formula has the operands that it has, and its text says what it is
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from veomni_hook.kernels.moe_experts.variants import LAYOUTS, Layout

#: Of one tensor, or of gate and up: nothing is known of it.
Function = Callable[..., Tensor]
#: What `expert` gets for operands that a layout does not have.
_ABSENT: dict[str, Any] = dict.fromkeys(("gate_up_bias", "down_bias", "act_fn", "norm", "alpha", "limit"))


def expert(
    states: Tensor,
    routing: Tensor,
    gate_up_proj: Tensor,
    gate_up_bias: Tensor,
    down_proj: Tensor,
    down_bias: Tensor,
    act_fn: Function,
    alpha: float,
    limit: float,
    norm: Function,
    layout: Layout,
) -> Tensor:
    """Return what one expert makes of its rows [rows, H], weighted by ``routing`` [rows, 1]."""
    both = product(states, gate_up_proj, gate_up_bias, layout)
    rows = product(gate(both, act_fn, alpha, limit, layout), down_proj, down_bias, layout)
    if layout.normalised:
        rows = norm(rows)
    return rows * (routing.float() if layout.in_float32 else routing)


def product(rows: Tensor, weight: Tensor, bias: Tensor, layout: Layout) -> Tensor:
    if layout.in_float32:
        rows, weight, bias = rows.float(), weight.float(), bias.float() if layout.biased else bias
    if layout.transposed:
        return rows @ weight + bias if layout.biased else rows @ weight
    return functional.linear(rows, weight, bias if layout.biased else None)


def gate(  # noqa: PLR0911 - one return a gate
    both: Tensor, act_fn: Function, alpha: float, limit: float, layout: Layout
) -> Tensor:
    """Return what is between the two products, with the casts of upstream."""
    if layout.gate == "activation":
        return act_fn(both)
    gate, up = (both[..., ::2], both[..., 1::2]) if layout.interleaved else both.chunk(2, dim=-1)
    if layout.gate == "jointly":
        return act_fn(gate, up)
    if layout.gate == "product":
        return act_fn(gate) * up
    if layout.gate == "product_float32":
        return (act_fn(gate.float()) * up.float()).to(gate.dtype)
    up = up.clamp(min=-limit, max=limit)
    if layout.gate == "clamped_after":
        return act_fn(gate).clamp(max=limit) * up
    gate = gate.clamp(max=limit)
    if layout.gate == "clamped":
        return act_fn(gate) * up
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@cache
def of(variant: str) -> Callable[..., Tensor]:
    """Return the formula of a layout: the sum over k of ``w_k * expert_k(x)``."""
    layout = LAYOUTS[variant]

    def formula(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *operands: Any) -> Tensor:
        named = dict(zip(layout.operands, operands, strict=True))
        dtype = {"weights": top_k_weights.dtype, "float32": torch.float32}.get(layout.summed_in)
        result = torch.zeros_like(hidden_states, dtype=dtype)
        for index in range(len(operands[0])):
            _add_rows(result, hidden_states, top_k_weights, top_k_index == index, _one(layout, index, named))
        return result.to(hidden_states.dtype)

    return formula


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
        one: Function = identity_expert
        if identity is not None:
            one = partial(module_expert, module=identity)
        if index < num_experts and gate_up_proj is not None and down_proj is not None:
            operands = {"gate_up_proj": gate_up_proj, "down_proj": down_proj, "act_fn": act_fn}
            one = _one(LAYOUTS["gated"], index, operands)
        _add_rows(result, hidden_states, top_k_weights, top_k_index == index, one)
    return result


def identity_expert(states: Tensor, routing: Tensor) -> Any:
    return states * routing


def modules(
    hidden_states: Tensor, expert_mask: Tensor, routing_weights: Tensor, experts: Iterable[object]
) -> Tensor:
    """Return the sum over k of ``w_k * expert(hidden_states)``, each expert a module.

    ``expert_mask`` [tokens, k, E] says who goes where; a token of no expert gets zero.
    """
    result = torch.zeros_like(hidden_states)
    for index, module in zip(range(expert_mask.shape[-1]), experts, strict=False):
        one = partial(module_expert, module=module)
        _add_rows(result, hidden_states, routing_weights, expert_mask[..., index] > 0, one)
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


def _one(layout: Layout, index: int, operands: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """Expert number ``index``, with its share of the stacked operands."""
    own = {
        name: held[index] if name.endswith(("_proj", "_bias")) else held for name, held in operands.items()
    }
    return partial(expert, **_ABSENT | own, layout=layout)


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
