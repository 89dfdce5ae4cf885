"""The gated delta rule, as in Qwen3-Next: one sample a row, and samples that share a row.

Where flash-linear-attention is installed, its function is another side: forward alone, unless its backward
runs with the Triton at hand.

Work counts the products of a forward in chunks of 64 positions: of queries and keys with keys, the solution
of the chunk's system, and four products with states and values. A step counts three times that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.gated_delta_rule.chunks import LENGTH
from veomni_hook.kernels.problem import Problem, Side, made
from veomni_hook.kernels.selection.registry import load_attribute
from veomni_hook.kernels.shared.samples import boundaries

__all__ = ["problem", "problems"]

# Name, rows, lengths of the samples of a row (empty: one), positions, heads of keys and of values, columns.
_ACCELERATOR = (
    ("1 row of 16,384", 1, 16384, 0, 16, 32, 128),
    ("16,384 in 16 samples", 1, 16384, 16, 16, 32, 128),
    ("2 rows of 4,096", 2, 4096, 0, 16, 32, 128),
    ("1 row of 16,384", 1, 16384, 0, 16, 64, 128),
    ("1 row of 65,536", 1, 65536, 0, 16, 32, 128),
)
_CPU = (("2 rows of 256", 2, 256, 0, 2, 4, 64), ("512 in 8 samples", 1, 512, 8, 2, 4, 64))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for name, rows, positions, samples, key_heads, heads, width in sizes[:2] if quick else sizes:
        query, key = (made(rows, positions, key_heads, width, device=device) for _ in range(2))
        value = made(rows, positions, heads, width, device=device)
        g = -made(rows, positions, heads, device=device, dtype=torch.float32).abs()
        beta = made(rows, positions, heads, device=device).sigmoid()
        yield problem(
            "gated_delta_rule",
            f"{name}, {key_heads} and {heads} heads of {width}",
            [query, key, value, g, beta],
            samples,
            {"eager": _upstream},
            "scalar_decay",
            ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        )


def problem(
    op: str,
    shape: str,
    leaves: Sequence[torch.Tensor],
    samples: int,
    sides: dict[str, Side],
    variant: str,
    fla: tuple[str, str],
) -> Problem:
    """Return the problem of one form of the rule.

    Args:
        op: its name in the list of benchmarks.
        shape: for people.
        leaves: query, key, value, decay, write strength.
        samples: of each row; 0 for one.
        sides: without kernels. Where samples share a row, these compute them as one: they have no boundaries.
        variant: the form of the rule: ``triton`` takes part on a GPU.
        fla: a module of flash-linear-attention and its function, which takes part where it is installed.
    """
    value = leaves[2]
    (rows, positions, heads, width), device = value.shape, value.device.type
    ends = list(range(0, positions + 1, positions // samples)) if samples else None
    bounds = None if ends is None else boundaries(ends, value.device)
    if device == "cuda" and find_spec("fla") is not None:
        sides["fla"] = partial(_fla, home=fla[0], name=fla[1], bounds=bounds)
    backends = {"torch": "torch", "ours": "triton"} if device == "cuda" else {"ours": "torch"}
    for side, backend in backends.items():
        kernel = load_attribute(f"veomni_hook.kernels.gated_delta_rule.{backend}:{variant}")
        sides[side] = partial(_kernel, kernel=kernel, bounds=bounds)
    by_chunk = 2 * LENGTH * LENGTH * (2 * width + width + width) + 6 * LENGTH * width * width
    flops = by_chunk * heads * rows * positions // LENGTH
    return Problem(
        op=op,
        shape=shape,
        leaves=leaves,
        sides=sides,
        limit="flops",
        work={"forward": flops, "step": flops * 3},
        incoming={"backward": [made(rows, positions, heads, width, device=device)]},
    )


def _upstream(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    # In early releases the layer does this, later the function.
    query, key = (heads.repeat_interleave(value.shape[2] // heads.shape[2], 2) for heads in (query, key))
    output, _ = torch_chunk_gated_delta_rule(query, key, value, *rest, use_qk_l2norm_in_kernel=True)
    assert isinstance(output, torch.Tensor)  # noqa: S101
    return output


def _kernel(
    *operands: torch.Tensor, kernel: Callable[..., tuple[torch.Tensor, object]], bounds: torch.Tensor | None
) -> torch.Tensor:
    return kernel(*operands, None, False, True, bounds)[0]


def _fla(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    home: str,
    name: str,
    bounds: torch.Tensor | None,
) -> torch.Tensor:
    function = getattr(import_module(home), name)
    output: torch.Tensor = function(
        query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds
    )[0]
    return output
