"""A language model's loss from hidden states: three products of matrices in a step forward and backward.

Its limit is the time of these three, each of them whole, in the same run: the rate of another product swings
with the clock by more than the loss adds to its own. Where the vocabulary is no multiple of 8, theirs is the
next one that is, or cuBLAS would multiply at a fraction of its rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch.nn import functional

from veomni_hook import accelerator
from veomni_hook.kernels.linear_cross_entropy.functional import linear_cross_entropy
from veomni_hook.kernels.problem import Problem, Side, made, peer

__all__ = ["problems", "products"]

# Rows, hidden size, vocabulary. The last but two is no multiple of 8.
_FIRST = ((8192, 2048, 151936), (16384, 4096, 151936))
_ACCELERATOR = (
    *_FIRST,
    *(
        (8192, *size)
        for size in product((2048, 2880, 4096, 5120), (128256, 151936, 201088))
        if (8192, *size) not in _FIRST
    ),
    (8192, 4096, 49155),
    (8192, 2560, 262144),
    (16384, 4096, 32000),
)
_CPU = ((2048, 1024, 151936), (1024, 256, 32000))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    dtype = torch.bfloat16 if device in accelerator.TYPES else torch.float32
    for rows, hidden, vocab in sizes[:2] if quick else sizes:
        x = made(rows, hidden, device=device, dtype=dtype)
        weight = made(vocab, hidden, device=device, dtype=dtype) * 0.02
        wide = functional.pad(weight, (0, 0, 0, -vocab % 8)) if vocab % 8 else weight
        target = torch.randint(0, vocab, (rows,), device=device)
        loss = partial(quack_loss, target=target)
        quack, absent = peer(device, "quack, float32 sums", loss)
        yield Problem(
            op="linear_cross_entropy",
            shape=f"{rows} x {hidden} x {vocab}",
            leaves=(x, weight),
            sides={**_sides(device, target), **quack},
            limit="products",
            work={"step": 6 * rows * hidden * vocab},
            products=partial(products, wide=wide),
            absent=absent,
        )


def _sides(device: str, target: torch.Tensor) -> dict[str, Side]:
    eager = partial(upstream, target=target)
    sides: dict[str, Side] = {"eager": eager}
    if device in accelerator.TYPES:
        sides["compile"] = torch.compile(eager, dynamic=False)
    if device == "cuda":
        for name, accumulate in (("liger", "weight"), ("liger, float32 sums", "float32")):
            sides[name] = partial(_liger, target=target, accumulate=accumulate)
    for name, accumulate in (("ours", "weight"), ("ours, float32 sums", "float32")):
        sides[name] = partial(linear_cross_entropy, target=target, accumulate=accumulate)
    return sides


def products(x: torch.Tensor, _: torch.Tensor, *, wide: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the three whole products of a step: the logits, and what the gradients are made by."""
    x, wide = x.detach(), wide.detach()
    logits = x @ wide.t()
    return logits @ wide, logits.t() @ x


def upstream(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss as transformers computes it."""
    return functional.cross_entropy(functional.linear(x, weight).float(), target)


def _liger(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, accumulate: str) -> torch.Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    sums = torch.float32 if accumulate == "float32" else None
    options = (None, None, -100, 0.0, 0.0, "mean", None, False, sums)
    loss: torch.Tensor = LigerFusedLinearCrossEntropyFunction.apply(x, weight, target, *options)[0]
    return loss


def quack_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean loss; the weight's gradient is summed in float32."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    loss: torch.Tensor = chunked_linear_cross_entropy(x, weight, target)
    return loss
