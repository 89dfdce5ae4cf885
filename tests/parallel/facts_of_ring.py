"""How far attention around a ring is from that of one process, in float64; and how much each process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.utils.flop_counter import FlopCounterMode

from tests.parallel import small
from veomni_hook.parallel import fused_pairs, partial_attention
from veomni_hook.parallel.collectives import own_part, part_length
from veomni_hook.parallel.groups import sequence_group
from veomni_hook.parallel.partial_attention import Formula
from veomni_hook.parallel.ring_attention import ring_attention

HEADS, KEY_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
LOWEST = torch.finfo(torch.float64).min


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def window(length: int) -> torch.Tensor:
    return causal(length).triu(-2)


def packed(length: int) -> torch.Tensor:
    samples = torch.arange(length) >= length // 3
    return causal(length) & (samples == samples[:, None])


def hidden_rows(length: int) -> torch.Tensor:
    """Padding on the left of one row: its queries see nothing."""
    mask = causal(length).repeat(2, 1, 1, 1)
    mask[1, :, :, : length // 2] = False
    return mask


def added(make: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    """The mask of eager attention."""
    return lambda length: torch.zeros(2, 1, length, length).double().masked_fill(~make(length), LOWEST)


def bias(length: int) -> torch.Tensor:
    """A slope for each head."""
    places = torch.arange(length)
    slopes = torch.arange(1, HEADS + 1).double().view(1, -1, 1, 1) / HEADS
    return torch.where(causal(length), (places - places[:, None]) * slopes, -torch.inf)


def columns(length: int) -> torch.Tensor:
    """Padding of keys, for all queries alike."""
    return (torch.arange(length) < torch.tensor([[length - 3], [length]]))[:, None, None]


#: The mask, whether attention is causal without one, and whether there are sinks and a softcap.
CASES: dict[str, tuple[Callable[[int], torch.Tensor] | None, bool, bool, bool]] = {
    "causal": (None, True, False, False),
    "all": (None, False, False, False),
    "window": (window, True, False, False),
    "packed": (packed, True, False, False),
    "hidden rows": (hidden_rows, True, False, False),
    "added": (added(packed), False, True, False),
    "added hidden rows": (added(hidden_rows), False, False, True),
    "bias": (bias, False, True, True),
    "columns": (columns, False, False, False),
}


def whole(x: dict[str, torch.Tensor], mask: Any, softcap: float | None, scaling: float) -> torch.Tensor:
    """Attention by definition; a query that sees no key gets zeros."""
    key, value = (x[name].repeat_interleave(HEADS // x[name].shape[1], 1) for name in ("key", "value"))
    scores = x["query"] @ key.mT * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    if "sinks" in x:
        sinks = x["sinks"].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], 3).softmax(3)[..., :-1] @ value
    return scores.softmax(3).nan_to_num(0.0) @ value


def operands(length: int, *, sinks: bool, dtype: torch.dtype, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = {
        "query": (2, HEADS, length, WIDTH),
        "key": (2, KEY_HEADS, length, WIDTH),
        "value": (2, KEY_HEADS, length, width),
        "upward": (2, HEADS, length, width),
        **({"sinks": (HEADS,)} if sinks else {}),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def compare(case: str, length: int, dtype: torch.dtype = torch.float64, width: int = VALUE_WIDTH) -> float:
    make, is_causal, has_sinks, capped = CASES[case]
    mask = None if make is None else make(length)
    formula = Formula(0.3, 2.0 if capped else None)
    given = operands(length, sinks=has_sinks, dtype=dtype, width=width)
    upward = given.pop("upward")
    group = sequence_group()

    def results(run: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> dict[str, torch.Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        output = run(leaves)
        gradients = torch.autograd.grad(output, [*leaves.values()], upward)
        return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}

    def around(x: dict[str, torch.Tensor]) -> torch.Tensor:
        own = [own_part(x[name], 2, group) for name in ("query", "key", "value")]
        part = ring_attention(*own, mask, x.get("sinks"), formula, group, full=length, causal=is_causal)
        place = group.rank * part_length(length, group)
        # What other processes have is a constant here; nobody sees the copies at the end.
        return torch.nn.functional.pad(part[:, :, : max(0, length - place)], (0, 0, place, length))[
            :, :, :length
        ]

    seen = causal(length) if make is None and is_causal else mask
    expected = results(lambda x: whole(x, seen, formula.softcap, formula.scaling))
    found = {name: x.contiguous() for name, x in results(around).items()}
    for x in found.values():
        distributed.all_reduce(x)
    return small.worst(found, expected)[0]


def facts(lengths: list[int], scores: int) -> dict[str, float]:
    """Return how far each case is, at its worst length, with so many scores at a time."""
    partial_attention._SCORES = scores
    return {case: max(compare(case, length) for length in lengths) for case in CASES}


def work(length: int) -> dict[str, int]:
    """Return how many operations the products of this process take, by case."""
    counts = {}
    for case in ("causal", "packed", "window", "all"):
        with FlopCounterMode(display=False) as counter:
            compare(case, length)
        counts[case] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        alone(length, torch.float64, VALUE_WIDTH)
    # Each process also computes the whole.
    return {case: count - counter.get_total_flops() for case, count in counts.items()}


def alone(length: int, dtype: torch.dtype, width: int) -> None:
    """Compute outputs and gradients in one process."""
    given = operands(length, sinks=False, dtype=dtype, width=width)
    upward = given.pop("upward")
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    torch.autograd.grad(whole(leaves, None, None, 1.0), [*leaves.values()], upward)


def fused() -> float:
    """Return how far pairs by torch's flash attention are: its operators for CPUs stand in for those of GPUs."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    groups = HEADS // KEY_HEADS

    def attend(query: Any, key: Any, value: Any, scaling: float, *, triangle: bool) -> Any:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        return forward(query, key, value, 0.0, triangle, scale=scaling)

    def gradients(
        grad: Any,
        query: Any,
        key: Any,
        value: Any,
        output: Any,
        logsumexp: Any,
        scaling: float,
        *,
        triangle: bool,
    ) -> Any:
        repeated = [x.repeat_interleave(groups, 1) for x in (key, value)]
        of_query, *others = backward(grad, query, *repeated, output, logsumexp, 0.0, triangle, scale=scaling)
        return of_query, *(x.unflatten(1, (-1, groups)).sum(2) for x in others)

    fused_pairs.fits, fused_pairs.attend, fused_pairs.gradients = (lambda *_: True), attend, gradients
    return max(compare(case, length, width=WIDTH) for case in ("causal", "all") for length in (15, 16))
