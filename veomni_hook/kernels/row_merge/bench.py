"""Features merged into the rows of placeholder tokens: half of the rows, one in eight, all.

Forward reads and writes as many rows as a copy of the inputs does. Backward reads the gradient and writes
those of the inputs and of the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, made

__all__ = ["problems"]

# Rows, columns, and one row of how many is merged.
_ACCELERATOR = ((32768, 4096, 2), (32768, 4096, 8), (32768, 4096, 1))
_CPU = ((2048, 1024, 2),)
#: Merged rows stand in so many runs, as those of images do.
_RUNS = 16


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for rows, columns, share in sizes[:2] if quick else sizes:
        length = max(1, rows // (_RUNS * share))
        mask = (torch.arange(rows, device=device) // length % share == 0).unsqueeze(1)
        inputs = made(rows, columns, device=device)
        source = made(int(mask.sum()), columns, device=device)
        yield Problem(
            op="row_merge",
            shape=f"{rows} x {columns}, one in {share}",
            leaves=(inputs, source),
            sides=_sides(mask, device),
            limit="bytes",
            work={"forward": 2 * inputs.nbytes, "backward": 2 * inputs.nbytes + source.nbytes},
            incoming={"backward": [torch.randn_like(inputs)]},
        )


def _sides(mask: torch.Tensor, device: str) -> dict[str, Side]:
    eager = partial(_upstream, mask=mask)
    found: dict[str, Side] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
    for name, side in beside("row_merge", "rows", device).items():
        found[name] = partial(_kernel, mask=mask, side=side)
    return found


def _upstream(inputs: torch.Tensor, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return inputs.masked_scatter(mask, source)


def _kernel(inputs: torch.Tensor, source: torch.Tensor, mask: torch.Tensor, side: Side) -> torch.Tensor:
    merged = side(inputs, mask, source, torch.Tensor.masked_scatter)
    assert isinstance(merged, torch.Tensor)  # noqa: S101
    return merged
