"""The gated delta rule with a decay for each channel, as in Kimi-Linear: one sample a row, and several.

Where flash-linear-attention is installed, its function is another side: forward alone, unless its backward
runs with the Triton at hand. Upstream's code holds a decay for each two positions of a chunk and channel:
16 GiB for 16,384 positions and 32 heads of 128, several times. The first size is smaller.

Work counts the products of a forward in chunks of 64 positions, as for a decay a head: of queries and keys
with keys, the solution of the chunk's system, and four products with states and values. A step counts three
times that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from veomni_hook import accelerator
from veomni_hook.bench.problem import Problem, Side, made
from veomni_hook.kernels.gated_delta_rule import channels
from veomni_hook.kernels.gated_delta_rule.chunks import LENGTH
from veomni_hook.kernels.shared.samples import boundaries

__all__ = ["problems"]

# Name, rows, positions, samples of a row (0: one), heads, columns.
_ACCELERATOR = (
    ("1 row of 4,096", 1, 4096, 0, 16, 128),
    ("1 row of 16,384", 1, 16384, 0, 32, 128),
    ("16,384 in 16 samples", 1, 16384, 16, 32, 128),
    ("2 rows of 4,096", 2, 4096, 0, 32, 128),
)
_CPU = (("2 rows of 128", 2, 128, 0, 2, 64), ("256 in 8 samples", 1, 256, 8, 2, 64))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for name, rows, positions, samples, heads, width in sizes[:2] if quick else sizes:
        query, key, value = (made(rows, positions, heads, width, device=device) for _ in range(3))
        g = -made(rows, positions, heads, width, device=device, dtype=torch.float32).abs()
        beta = made(rows, positions, heads, device=device).sigmoid()
        by_chunk = 2 * LENGTH * LENGTH * (2 * width + width + width) + 6 * LENGTH * width * width
        flops = by_chunk * heads * rows * positions // LENGTH
        ends = list(range(0, positions + 1, positions // samples)) if samples else None
        bounds = None if ends is None else boundaries(ends, query.device)
        yield Problem(
            op="gated_delta_rule_channels",
            shape=f"{name}, {heads} heads of {width}",
            leaves=[query, key, value, g, beta],
            sides=_sides(bounds, device),
            limit="flops",
            work={"forward": flops, "step": flops * 3},
            incoming={"backward": [made(rows, positions, heads, width, device=device)]},
        )


def _sides(bounds: torch.Tensor | None, device: str) -> dict[str, Side]:
    """Where samples share a row, upstream's code computes them as one: it has no boundaries."""
    sides: dict[str, Side] = {"eager": _upstream}
    if device in accelerator.TYPES:
        sides["compile"] = torch.compile(_upstream, dynamic=False)
    if device == "cuda" and find_spec("fla") is not None:
        sides["fla"] = partial(_fla, bounds=bounds)
    if device == "cuda":
        from veomni_hook.kernels.gated_delta_rule.channel_triton import channel_decay

        sides["torch"] = partial(_kernel, kernel=channels.channel_decay, bounds=bounds)
        sides["ours"] = partial(_kernel, kernel=channel_decay, bounds=bounds)
    else:
        sides["ours"] = partial(_kernel, kernel=channels.channel_decay, bounds=bounds)
    return sides


def _upstream(*operands: torch.Tensor) -> torch.Tensor:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    # Its own code, also where a package is installed.
    function = getattr(chunk_kimi_delta_attention, "__wrapped__", chunk_kimi_delta_attention)
    output: torch.Tensor = function(*operands, use_qk_l2norm_in_kernel=True)[0]
    return output


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    kernel: Callable[..., tuple[torch.Tensor, Any]],
    bounds: torch.Tensor | None,
) -> torch.Tensor:
    return kernel(query, key, value, g, beta, None, False, True, bounds)[0]


def _fla(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    bounds: torch.Tensor | None,
) -> torch.Tensor:
    from fla.ops.kda import chunk_kda

    output: torch.Tensor = chunk_kda(
        query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds
    )[0]
    return output
