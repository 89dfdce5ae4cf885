"""Rotary embedding of queries and keys: both passes read and write each; the tables are small beside them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from veomni_hook import accelerator
from veomni_hook.kernels.problem import Problem, made, peer, sides_of

__all__ = ["overwriting", "problems", "tables"]

# Batch, positions, heads of queries and of keys, head_dim; the last are those of Qwen3-VL's tower.
_ACCELERATOR = (
    *((16, 8192, 32, 8, 128), (4, 4096, 32, 8, 128), (16, 8192, 16, 2, 256), (8, 8192, 64, 8, 64)),
    (8, 8192, 16, 16, 72),
)
_CPU = ((1, 512, 16, 8, 128), (2, 1024, 16, 8, 128))


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size; gradients arrive in the order of the projections' memory, and in the other."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as upstream

    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    for batch, length, heads, key_heads, width in sizes[:2] if quick else sizes:
        q, k = (made(batch, length, n, width, device=device).transpose(1, 2) for n in (heads, key_heads))
        cos, sin = tables(length, width, device)
        half = (table[0, :, : width // 2].contiguous() for table in (cos, sin))
        turn = partial(quack_rotary, **dict(zip(("cos", "sin"), half, strict=True)))
        quack, absent = peer(device, "quack", turn)
        eager = partial(upstream, cos=cos, sin=sin)
        sides = sides_of("rotary", "half_split", device, eager=eager, cos=cos, sin=sin)
        if "liger" in sides:
            sides["liger"] = partial(overwriting, cos=cos, sin=sin)
        moved = 2 * (q.nbytes + k.nbytes)
        yield Problem(
            op="rotary",
            shape=f"{batch} x {length} x {heads}/{key_heads} x {width}",
            leaves=(q, k),
            sides={**sides, **quack},
            limit="bytes",
            work={"forward": moved, "backward": moved, "backward, heads first": moved},
            incoming={
                "backward": [torch.randn_like(x) for x in (q, k)],
                "backward, heads first": [torch.randn_like(x.contiguous()) for x in (q, k)],
            },
            spoils=frozenset({"liger"}),
            absent=absent,
        )


def tables(length: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin ``[1, length, width]``: halves are equal, as Liger needs, lengths stay."""
    angles = made(1, length, width // 2, device=device, dtype=torch.float32).repeat(1, 1, 2)
    return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


# Not our backend `liger`, which hands its kernel copies: a user of Liger has no pass for them.
def overwriting(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``q`` and ``k`` rotated by Liger as it comes: in their own memory, and so the gradients."""
    from liger_kernel.ops.rope import LigerRopeFunction

    rotated: tuple[torch.Tensor, torch.Tensor] = LigerRopeFunction.apply(q, k, cos, sin)
    return rotated


def quack_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated ``q`` and ``k`` ``[batch, heads, length, head_dim]`` by ``[length, head_dim / 2]``."""
    from quack.rotary import apply_rotary_emb

    turned, other = (apply_rotary_emb(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
    return turned, other
