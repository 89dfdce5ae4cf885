"""The variants once more, in other words: a formula for one token and one expert, and a loop like upstream's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu, linear, one_hot, silu

HIDDEN, INNER, EXPERTS, TOKENS, TOP_K = 12, 10, 5, 17, 3
ALPHA, LIMIT = 1.3, 0.4  # a limit that bites
SENTINEL = EXPERTS


def halves(values):
    return values[..., : values.shape[-1] // 2], values[..., values.shape[-1] // 2 :]


def alpha_gate(gate, up):
    gate, up = gate.clamp(None, LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


def squashed(gate, up):
    return torch.tanh(gate) * up.sigmoid()


def scaled(rows):
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)


def gated(x, gate_up, down, act):
    gate, up = halves(linear(x, gate_up))
    return linear(act(gate) * up, down)


def gated_clamped(x, gate_up, down, act, limit):
    gate, up = halves(linear(x, gate_up))
    return linear(act(gate.clamp(None, limit)) * up.clamp(-limit, limit), down)


def gated_clamped_after(x, gate_up, down, act, limit):
    gate, up = halves(linear(x, gate_up))
    return linear(act(gate).clamp(None, limit) * up.clamp(-limit, limit), down)


def gated_float32_product(x, gate_up, down, act):
    gate, up = halves(linear(x, gate_up))
    return linear((act(gate.float()) * up.float()).to(x.dtype), down)


def gated_jointly(x, gate_up, down, act):
    return linear(act(*halves(linear(x, gate_up))), down)


def gated_normalised(x, gate_up, down, act, norm):
    return norm(gated(x, gate_up, down, act))


def gated_transposed(x, gate_up, down, act):
    gate, up = halves(x @ gate_up)
    return (act(gate) * up) @ down


def alpha_gated(x, gate_up, down, alpha, limit):
    return linear(alpha_gate(*halves(linear(x, gate_up))), down)


def biased_interleaved_alpha_gated(x, gate_up, gate_up_bias, down, down_bias, alpha, limit):
    both = x @ gate_up + gate_up_bias
    return alpha_gate(both[..., 0::2], both[..., 1::2]) @ down + down_bias


def biased_alpha_gated_float32(x, gate_up, gate_up_bias, down, down_bias, alpha, limit):
    both = x.float() @ gate_up.float() + gate_up_bias.float()
    return alpha_gate(*halves(both)) @ down.float() + down_bias.float()


def ungated(x, up, down, act):
    return linear(act(linear(x, up)), down)


ROWS = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
COLUMNS = {"gate_up": (HIDDEN, 2 * INNER), "down": (INNER, HIDDEN)}
BIASED = {"gate_up": (HIDDEN, 2 * INNER), "b": (2 * INNER,), "down": (INNER, HIDDEN), "c": (HIDDEN,)}


@dataclass(frozen=True)
class Case:
    """A variant with what it is tested on; ``dtype`` is what its results are added up in."""

    expert: Callable[..., torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    rest: tuple[object, ...]
    dtype: str = "hidden"


CASES = {
    "gated": Case(gated, ROWS, (silu,)),
    "gated_clamped": Case(gated_clamped, ROWS, (gelu, LIMIT)),
    "gated_clamped_after": Case(gated_clamped_after, ROWS, (silu, LIMIT)),
    "gated_float32_product": Case(gated_float32_product, ROWS, (silu,)),
    "gated_jointly": Case(gated_jointly, ROWS, (squashed,), "float32"),
    "gated_normalised": Case(gated_normalised, ROWS, (silu, scaled)),
    "gated_transposed": Case(gated_transposed, COLUMNS, (silu,)),
    "alpha_gated": Case(alpha_gated, ROWS, (ALPHA, LIMIT)),
    "biased_interleaved_alpha_gated": Case(biased_interleaved_alpha_gated, BIASED, (ALPHA, LIMIT)),
    "biased_alpha_gated_float32": Case(biased_alpha_gated_float32, BIASED, (ALPHA, LIMIT), "float32"),
    "ungated": Case(ungated, {"up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}, (gelu,), "weights"),
}


def accumulation(case, hidden_states, top_k_weights):
    """The dtype that the results of ``case`` are added up in."""
    return {"hidden": hidden_states.dtype, "weights": top_k_weights.dtype, "float32": torch.float32}[
        case.dtype
    ]


def loop(case, hidden_states, top_k_index, top_k_weights, *weights):
    """The experts one after the other, found by a mask with a row for the sentinel."""
    result = torch.zeros_like(hidden_states, dtype=accumulation(case, hidden_states, top_k_weights))
    mask = one_hot(top_k_index, EXPERTS + 1).permute(2, 1, 0)
    for number in mask.sum((-1, -2)).nonzero()[:, 0]:
        if number == SENTINEL:
            continue
        place, token = torch.where(mask[number])
        out = case.expert(hidden_states[token], *(weight[number] for weight in weights), *case.rest)
        out = out * top_k_weights[token, place, None]
        result.index_add_(0, token, out.to(result.dtype))
    return result.to(hidden_states.dtype)


def one_by_one(case, hidden_states, top_k_index, top_k_weights, *weights):
    """Every token and every one of its experts by itself."""
    rows = []
    for token, ids in enumerate(top_k_index.tolist()):
        total = torch.zeros_like(hidden_states[token])
        for place, number in enumerate(ids):
            if number != SENTINEL:
                own = [weight[number] for weight in weights]
                out = case.expert(hidden_states[token, None], *own, *case.rest)[0]
                total = total + out * top_k_weights[token, place]
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(hidden_states)


def inputs(case, dtype=torch.float32, weights_dtype=None, tokens=TOKENS, ids=None):
    """``hidden_states, top_k_index, top_k_weights`` and the experts' weights, random."""
    if ids is None:
        # Some experts get nobody, some tokens the sentinel, some tokens one expert twice.
        ids = torch.randint(0, EXPERTS + 1, (tokens, TOP_K))
        ids[ids == 1] = 3
    weights = [torch.randn(EXPERTS, *shape).to(dtype) * 0.5 for shape in case.shapes.values()]
    routing = torch.rand(len(ids), TOP_K).to(weights_dtype or dtype)
    return [torch.randn(len(ids), HIDDEN).to(dtype), ids, routing, *weights]
