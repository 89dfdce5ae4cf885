"""A residual addition and its RMSNorm on a CUDA device: `python -m benchmarks.add_rms_norm_gpu`.

Upstream's statements, torch.compile, Liger, upstream's addition with this package's RMSNorm (`apart`), and
both fused (`ours`). Shares are of the bytes that a fused one has to move: four times a tensor, each way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks._peers import Row, bandwidth, by_turns, host_time, record, wall_time
from benchmarks._steps import EPS, step, upstream_rms_norm
from veomni_hook.kernels.add_rms_norm.triton import cast_before_weight
from veomni_hook.kernels.rms_norm import triton as norms

SHAPES = ((131072, 4096), (262144, 2048), (65536, 8192), (131072, 5120), (16384, 4096))
Pair = tuple[torch.Tensor, torch.Tensor]
Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Pair]


def upstream(residual: torch.Tensor, hidden_states: torch.Tensor, weight: torch.Tensor) -> Pair:
    """Return the sum and its norm, statement by statement."""
    total = residual + hidden_states
    return total, upstream_rms_norm(total, weight)


def apart(residual: torch.Tensor, hidden_states: torch.Tensor, weight: torch.Tensor) -> Pair:
    """Return the sum and its norm by this package's RMSNorm."""
    total = residual + hidden_states
    return total, norms.cast_before_weight(total, weight, EPS)


def sides() -> dict[str, Norm]:
    """The implementations that this machine has."""
    found: dict[str, Norm] = {"eager": upstream, "compile": torch.compile(upstream, dynamic=False)}
    try:
        from veomni_hook.kernels.add_rms_norm import liger

        liger._function()
    except ImportError:
        print("liger_kernel is not installed")
    else:
        found["liger"] = partial(liger.cast_before_weight, eps=EPS)
    return found | {"apart": apart, "ours": partial(cast_before_weight, eps=EPS)}


def main() -> None:
    """Measure every shape and record the results."""
    torch.manual_seed(0)
    copied = bandwidth()
    rows = [row for shape in SHAPES for row in measured(shape, copied)]
    record(
        "add_rms_norm_gpu",
        rows,
        copy_bytes_per_second=copied,
        host_milliseconds=steps(64, host_time),
        wall_milliseconds_16384_x_4096=steps(16384, wall_time),
    )


def steps(rows: int, timed: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """A forward and backward of ``rows`` x 4096 by every implementation."""
    given = [torch.randn(size, device="cuda").bfloat16() for size in ((rows, 4096), (rows, 4096), (4096,))]
    incoming = [torch.randn_like(given[0]) for _ in range(2)]
    found = {name: timed(partial(step, side, given, incoming)) for name, side in sides().items()}
    print(f"{timed.__name__} of a forward and backward at {rows} x 4096, ms: {found}")
    return found


def measured(shape: tuple[int, int], copied: float) -> Iterator[Row]:
    """Forward and backward at one size."""
    torch._dynamo.reset()
    given = [torch.randn(size, device="cuda").bfloat16() for size in (shape, shape, shape[-1:])]
    incoming = [torch.randn_like(given[0]) for _ in range(2)]
    calls, backwards = {}, {}
    for name, side in sides().items():
        calls[name] = partial(without_grad, side, *given)
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        backwards[name] = partial(torch.autograd.grad, side(*leaves), leaves, incoming, retain_graph=True)
    size = f"{shape[0]} x {shape[1]}"
    for part, found in (("forward", calls), ("backward", backwards)):
        times = by_turns(found)
        moving = 4 * given[0].nbytes
        shares = {name: moving / taken * 1e3 / copied for name, taken in times.items()}
        yield Row("add_rms_norm", part, "bfloat16", size, moving, times, shares)


def without_grad(side: Norm, *given: torch.Tensor) -> Pair:
    """One forward that keeps nothing."""
    with torch.no_grad():
        return side(*given)


if __name__ == "__main__":
    main()
