"""Hyper-connections of four streams: the weights in front of a block, the sum at the end, and the mixture.

At least, forward reads the streams once (the mixture writes as many), and backward reads and writes them.
Sinkhorn's method takes 20 iterations, as in DeepSeek-V4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, made, sides_of
from veomni_hook.kernels.rms_norm.reference import unweighted

__all__ = ["problems"]

_OP = "hyper_connection"
_STREAMS = 4
# Tokens and columns.
_ACCELERATOR = ((8192, 4096), (8192, 7168))
_CPU = ((256, 512),)


class _Norm(nn.Module):
    eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return unweighted(x, self.eps)


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every variant at every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for tokens, columns in sizes[:1] if quick else sizes:
        yield _mix(tokens, columns, device)
        yield _weights("sinkhorn", (2 + _STREAMS) * _STREAMS, 3, (tokens, columns), device)
        yield _weights("collapse", _STREAMS, 1, (tokens, columns), device)


def _weights(variant: str, weights: int, scales: int, size: tuple[int, int], device: str) -> Problem:
    tokens, columns = size
    x = made(1, tokens, _STREAMS, columns, device=device)
    fn = made(weights, _STREAMS * columns, device=device, dtype=torch.float32) / columns**0.5
    base = made(weights, device=device, dtype=torch.float32)
    scale = made(scales, device=device, dtype=torch.float32)
    norm = _Norm()
    rest = (_STREAMS, 20, 1e-6) if variant == "sinkhorn" else (1e-6,)
    work = {"forward": x.nbytes + x.nbytes // _STREAMS, "backward": 2 * x.nbytes + x.nbytes // _STREAMS}
    return _problem(
        variant,
        (x, fn, base, scale),
        lambda side, x, fn, base, scale: side(x, norm, _Norm, fn, base, scale, *rest),
        work,
        device,
    )


def _mix(tokens: int, columns: int, device: str) -> Problem:
    x = made(1, tokens, _STREAMS, columns, device=device)
    output = made(1, tokens, columns, device=device)
    post = made(1, tokens, _STREAMS, device=device, dtype=torch.float32).sigmoid()
    comb = made(1, tokens, _STREAMS, _STREAMS, device=device, dtype=torch.float32).softmax(-1)
    work = {"forward": 2 * x.nbytes + output.nbytes, "backward": 3 * x.nbytes + 2 * output.nbytes}
    return _problem(
        "mix", (post, comb, output, x), lambda side, *leaves: side(*leaves, x.dtype), work, device
    )


def _problem(
    variant: str, leaves: Sequence[torch.Tensor], call: Side, work: Mapping[str, int], device: str
) -> Problem:
    sides = sides_of(_OP, variant, device, call=call)
    with torch.no_grad():
        results = sides["eager"](*leaves)
    results = results if isinstance(results, tuple) else (results,)
    tokens, columns = leaves[0].shape[1], results[-1].shape[-1]
    return Problem(
        op=_OP,
        shape=f"{variant}, {tokens} x {_STREAMS} x {columns}",
        leaves=leaves,
        sides=sides,
        limit="bytes",
        work=work,
        incoming={"backward": [torch.randn_like(result) for result in results]},
    )
