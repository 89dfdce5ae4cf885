"""The layouts once more, in other words: a formula for one token and one expert, and a loop like upstream's."""

import copy

import torch
from torch.nn.functional import gelu, linear, one_hot, silu

from veomni_hook.kernels.moe_experts.variants import LAYOUTS, OP, Layout

HIDDEN, INNER, EXPERTS, TOKENS, TOP_K = 12, 10, 5, 17, 3
ALPHA, LIMIT = 1.3, 0.4  # a limit that bites
SENTINEL = EXPERTS


def squashed(gate, up):
    return torch.tanh(gate) * up.sigmoid()


def scaled(rows):
    return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-5)


def alpha_gate(gate, up, alpha, limit):
    gate, up = gate.clamp(None, limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


#: By the name of a layout's gate: the formula, and what it is called with.
GATES = {
    "product": (lambda gate, up, act: act(gate) * up, (silu,)),
    "clamped": (lambda gate, up, act, limit: act(gate.clamp(None, limit)) * up.clamp(-limit, limit), (gelu, LIMIT)),
    "clamped_after": (lambda gate, up, act, limit: act(gate).clamp(None, limit) * up.clamp(-limit, limit), (silu, LIMIT)),
    "product_float32": (lambda gate, up, act: (act(gate.float()) * up.float()).to(gate.dtype), (silu,)),
    "jointly": (lambda gate, up, act: act(gate, up), (squashed,)),
    "scaled_sigmoid": (alpha_gate, (ALPHA, LIMIT)),
    "activation": (lambda both, act: act(both), (gelu,)),
}  # fmt: skip


class Case:
    """A layout: one expert's formula, the shapes of its weights, and the operands after them."""

    def __init__(self, name):
        self.layout = layout = LAYOUTS[name]
        self.gate, rest = GATES[layout.gate]
        self.rest = (*rest, *(scaled,) * layout.normalised)
        sizes = ((1 if layout.gate == "activation" else 2) * INNER, HIDDEN), (HIDDEN, INNER)
        shapes = [size[::-1] if layout.transposed else size for size in sizes]
        if layout.biased:
            shapes = [shapes[0], sizes[0][:1], shapes[1], sizes[1][:1]]
        self.shapes = dict(zip(layout.operands, shapes, strict=False))

    def resized(self, sizes):
        """This layout with weights of other ``sizes``, by those that they have."""
        found = copy.copy(self)
        found.shapes = {name: tuple(sizes[size] for size in shape) for name, shape in self.shapes.items()}
        return found

    def expert(self, x, *operands):
        layout, count = self.layout, len(self.shapes)
        weights, rest = operands[:count], operands[count:]
        if layout.in_float32:
            x, weights = x.float(), [each.float() for each in weights]
        biases = weights[1::2] if layout.biased else (None, None)
        first, last = weights[:: count // 2]

        def product(rows, weight, bias):
            if not layout.transposed:
                return linear(rows, weight, bias)
            return rows @ weight if bias is None else rows @ weight + bias

        both = product(x, first, biases[0])
        half = both.shape[-1] // 2
        parts = (
            (both[..., 0::2], both[..., 1::2]) if layout.interleaved else (both[..., :half], both[..., half:])
        )
        parts = (both,) if layout.gate == "activation" else parts
        out = product(self.gate(*parts, *rest[: len(rest) - layout.normalised]), last, biases[1])
        return rest[-1](out) if layout.normalised else out


#: Those with a row in the table.
CASES = {name: Case(name) for name, row in OP.variants.items() if isinstance(row.form, Layout)}


def accumulation(case, hidden_states, top_k_weights):
    """The dtype that the results of ``case`` are added up in."""
    dtypes = {"hidden": hidden_states.dtype, "weights": top_k_weights.dtype, "float32": torch.float32}
    return dtypes[case.layout.summed_in]


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
