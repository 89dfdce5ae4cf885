"""Rotary embedding, ours beside upstream, torch.compile and Liger: `python -m benchmarks.rotary_gpu`.

Query and key are `[batch, heads, length, head_dim]` views of `[batch, length, heads, head_dim]` memory, as
projections leave them. Gradients of attention arrive in the same order of memory or in the other one,
`[batch, heads, length, head_dim]`. Bytes: what turns, read once and written once. Liger turns in place, its
forward and its backward; each gets tensors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks._peers import Row, bandwidth, by_turns, host_time, record, wall_time
from benchmarks._steps import step
from veomni_hook.kernels.rotary import reference
from veomni_hook.kernels.rotary import triton as fused

Tensor = torch.Tensor
Rotate = Callable[..., tuple[Tensor, Tensor]]


class Size(NamedTuple):
    """A call: heads of query and key, and how many columns of a head turn."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    rotated: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}x{self.heads}/{self.kv_heads}x{self.width}"


SIZES = (
    Size(16, 8192, 32, 8, 128, 128),
    Size(4, 8192, 32, 8, 128, 128),
    Size(1, 65536, 28, 4, 128, 128),
    Size(16, 8192, 16, 2, 256, 256),
    Size(16, 8192, 32, 8, 64, 64),
)
#: Variants other than the plain one, at one size each.
OTHERS = {
    "half_split_partial": Size(16, 8192, 32, 8, 128, 64),
    "half_split_fp32": Size(1, 65536, 16, 16, 80, 80),
    "half_width_halves": Size(16, 8192, 64, 8, 64, 64),
    "pairs_to_halves": Size(16, 8192, 32, 1, 64, 64),
    "pairs_fp32": Size(16, 8192, 32, 8, 128, 128),
}


def sides(variant: str) -> dict[str, Rotate]:
    """The implementations that this machine has of a variant."""
    plain = variant == "half_split"
    upstream = apply_rotary_pos_emb if plain else getattr(reference, variant)
    found: dict[str, Rotate] = {"eager": upstream, "compile": torch.compile(upstream, dynamic=False)}
    if plain:
        try:
            from liger_kernel.ops.rope import LigerRopeFunction
        except ImportError:
            print("liger_kernel is not installed")
        else:
            found["liger"] = LigerRopeFunction.apply
    return found | {"ours": getattr(fused, variant)}


def states(size: Size) -> list[Tensor]:
    """Query and key as projections leave them."""
    return [
        torch.randn(size.batch, size.length, heads, size.width, device="cuda").bfloat16().transpose(1, 2)
        for heads in (size.heads, size.kv_heads)
    ]


def tables(variant: str, size: Size) -> list[Tensor]:
    """Cos and sin as rotary modules give them: halves alike, so that Liger's reading of one half is right."""
    angle = torch.randn(1, size.length, size.rotated // 2, device="cuda")
    if not variant.startswith("half_width"):
        angle = torch.cat((angle, angle), dim=-1)
    return [angle.cos().bfloat16(), angle.sin().bfloat16()]


def main() -> None:
    """Measure every size and record the results."""
    torch.manual_seed(0)
    copied = bandwidth()
    cases = [*(("half_split", size) for size in SIZES), *OTHERS.items()]
    rows = [row for variant, size in cases for row in measured(variant, size, copied)]
    record(
        "rotary_gpu",
        rows,
        copy_bytes_per_second=copied,
        host_milliseconds=steps(Size(1, 64, 32, 8, 128, 128), host_time),
        wall_milliseconds_2_x_4096=steps(Size(2, 4096, 32, 8, 128, 128), wall_time),
    )


def steps(size: Size, timed: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """A forward and backward of every implementation."""
    cos, sin = tables("half_split", size)
    found = {}
    for name, side in sides("half_split").items():
        given = states(size)
        incoming = [torch.randn_like(x) for x in given]
        found[name] = timed(partial(step, partial(turned, side, cos, sin), given, incoming))
    print(f"{timed.__name__} of a forward and backward at {size}, ms: {found}")
    return found


def turned(side: Rotate, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The call in the order that every implementation takes."""
    return side(q, k, cos, sin)


def measured(variant: str, size: Size, copied: float) -> Iterator[Row]:
    """Forward, and backward with gradients in either order, at one size."""
    torch._dynamo.reset()
    cos, sin = tables(variant, size)
    calls, backwards, crossed = {}, {}, {}
    for name, side in sides(variant).items():
        given = states(size)
        calls[name] = partial(without_grad, side, *given, cos, sin)
        leaves = [x.clone().requires_grad_() for x in given] if name == "liger" else given
        ys = side(*[x.requires_grad_() for x in leaves], cos, sin)
        for kept, order in ((backwards, torch.preserve_format), (crossed, torch.contiguous_format)):
            incoming = [torch.randn_like(x, memory_format=order) for x in given]
            kept[name] = partial(torch.autograd.grad, ys, leaves, incoming, retain_graph=True)
    moving = 2 * sum(x.nbytes for x in given)
    parts = (("forward", calls), ("backward", backwards), ("backward, heads apart", crossed))
    for part, found in parts:
        times = by_turns(found)
        shares = {name: moving / taken * 1e3 / copied for name, taken in times.items()}
        yield Row(variant, part, "bfloat16", str(size), moving, times, shares)


def without_grad(side: Rotate, *given: Tensor) -> tuple[Tensor, Tensor]:
    """One forward that keeps nothing."""
    with torch.no_grad():
        return side(*given)


if __name__ == "__main__":
    main()
