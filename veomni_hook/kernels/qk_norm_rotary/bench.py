"""Norm and rotation of queries and keys: forward reads and writes each, backward reads two and writes one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, Side, beside, made
from veomni_hook.kernels.rms_norm.bench import EPS, upstream
from veomni_hook.kernels.rotary.bench import overwriting, tables

__all__ = ["problems"]

_ACCELERATOR = ((16, 8192, 32, 8, 128), (4, 4096, 32, 8, 128), (8, 8192, 16, 8, 64))
_CPU = ((1, 512, 16, 8, 128), (2, 1024, 16, 8, 128))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size; gradients arrive in the order of the projections' memory, and in the other."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for batch, length, heads, key_heads, width in sizes[:2] if quick else sizes:
        q, k = (made(batch, length, n, width, device=device).transpose(1, 2) for n in (heads, key_heads))
        weights = [made(width, device=device) for _ in "qk"]
        cos, sin = tables(length, width, device)
        size = q.nbytes + k.nbytes
        yield Problem(
            op="qk_norm_rotary",
            shape=f"{batch} x {length} x {heads}/{key_heads} x {width}",
            leaves=(q, k, *weights),
            sides=_sides(device, cos, sin),
            limit="bytes",
            work={"forward": 2 * size, "backward": 3 * size, "backward, heads first": 3 * size},
            incoming={
                "backward": [torch.randn_like(x) for x in (q, k)],
                "backward, heads first": [torch.randn_like(x.contiguous()) for x in (q, k)],
            },
            spoils=frozenset({"liger"}),
        )


def _sides(device: str, cos: torch.Tensor, sin: torch.Tensor) -> dict[str, Side]:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    eager = partial(_chain, upstream, partial(apply_rotary_pos_emb, cos=cos, sin=sin))
    sides: dict[str, Side] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
    norms = beside("rms_norm", "cast_before_weight", device)
    rotaries = beside("rotary", "half_split", device)
    for name in norms.keys() & rotaries.keys():
        # Liger's rotation as its users get it, in place: our backend would give it copies.
        called, rotary = ("ours, one by one", rotaries[name]) if name == "ours" else (name, overwriting)
        sides[called] = partial(_chain, partial(norms[name], eps=EPS), partial(rotary, cos=cos, sin=sin))
    fused = beside("qk_norm_rotary", "cast_before_weight_half_split", device)
    if "ours" in fused:
        sides["ours"] = partial(_fused, fused["ours"], cos, sin)
    return sides


def _chain(
    norm: Side,
    rotary: Side,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    # As in attention: the norm sees the projections' memory.
    q, k = (norm(x.transpose(1, 2), w).transpose(1, 2) for x, w in ((q, q_weight), (k, k_weight)))  # type: ignore[union-attr]
    rotated = rotary(q, k)
    assert isinstance(rotated, tuple)  # noqa: S101
    return rotated


def _fused(
    kernel: Side, cos: torch.Tensor, sin: torch.Tensor, *leaves: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    rotated = kernel(*leaves, EPS, EPS, cos, sin)
    assert isinstance(rotated, tuple)  # noqa: S101
    return rotated
