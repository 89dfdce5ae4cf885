"""The gated delta rule with a decay for each channel, as in Kimi-Linear: one sample a row, and several.

Where flash-linear-attention is installed, its function is another side: forward alone, unless its backward
runs with the Triton at hand. Upstream's code holds a decay for each two positions of a chunk and channel:
16 GiB for 16,384 positions and 32 heads of 128, several times. The first size is smaller.

Work counts the products of a forward in chunks of 64 positions, as for a decay a head: of queries and keys
with keys, the solution of the chunk's system, and four products with states and values. A step counts three
times that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.gated_delta_rule.bench import problem
from veomni_hook.kernels.problem import Problem, Side, made

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
        sides: dict[str, Side] = {"eager": _upstream}
        if device in accelerator.TYPES:
            sides["compile"] = torch.compile(_upstream, dynamic=False)
        yield problem(
            "gated_delta_rule_channels",
            f"{name}, {heads} heads of {width}",
            [query, key, value, g, beta],
            samples,
            sides,
            "channel_decay",
            ("fla.ops.kda", "chunk_kda"),
        )


def _upstream(*operands: torch.Tensor) -> torch.Tensor:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    # Its own code, also where a package is installed.
    function = getattr(chunk_kimi_delta_attention, "__wrapped__", chunk_kimi_delta_attention)
    output: torch.Tensor = function(*operands, use_qk_l2norm_in_kernel=True)[0]
    return output
