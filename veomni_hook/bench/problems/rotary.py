"""Rotary embedding of queries and keys: both passes read and write each; the tables are small beside them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from veomni_hook.bench.problem import Problem, Side, beside, made

__all__ = ["problems"]

# Batch, positions, heads of queries and of keys, head_dim.
_CUDA = ((16, 8192, 32, 8, 128), (4, 4096, 32, 8, 128), (16, 8192, 16, 2, 256), (8, 8192, 64, 8, 64))
_CPU = ((1, 512, 16, 8, 128), (2, 1024, 16, 8, 128))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size; gradients arrive in the order of the projections' memory, and in the other."""
    sizes = _CUDA if device == "cuda" else _CPU
    for batch, length, heads, key_heads, width in sizes[:2] if quick else sizes:
        q, k = (made(batch, length, n, width, device=device).transpose(1, 2) for n in (heads, key_heads))
        cos, sin = (made(1, length, width, device=device) for _ in "cs")
        moved = 2 * (q.nbytes + k.nbytes)
        yield Problem(
            op="rotary",
            shape=f"{batch} x {length} x {heads}/{key_heads} x {width}",
            leaves=(q, k),
            sides=_sides(device, cos, sin),
            limit="bytes",
            work={"forward": moved, "backward": moved, "backward, heads first": moved},
            incoming={
                "backward": [torch.randn_like(x) for x in (q, k)],
                "backward, heads first": [torch.randn_like(x.contiguous()) for x in (q, k)],
            },
            spoils=frozenset({"liger"}),
        )


def _sides(device: str, cos: torch.Tensor, sin: torch.Tensor) -> dict[str, Side]:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    upstream = partial(apply_rotary_pos_emb, cos=cos, sin=sin)
    found: dict[str, Side] = {"eager": upstream, "compile": torch.compile(upstream, dynamic=False)}
    for name, side in beside("rotary", "half_split", device).items():
        found[name] = partial(side, cos=cos, sin=sin)
    return found
