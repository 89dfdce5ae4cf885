"""RMSNorm of upstream, torch.compile, Liger and ours on a CUDA device: `python -m benchmarks.rms_norm_gpu`.

Backwards are timed alone, from a graph that is kept. Host time is that of a forward and backward of small
tensors in eager mode; wall time that of steps that follow each other, where device and host overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks._peers import Row, bandwidth, by_turns, host_time, record, wall_time
from benchmarks._steps import EPS, step, upstream_rms_norm
from veomni_hook.kernels.rms_norm.triton import cast_before_weight

SHAPES = (
    (131072, 4096),
    (4194304, 128),
    (262144, 2048),
    (65536, 8192),
    (131072, 5120),
    (174762, 3072),
    (209715, 2560),
    (43690, 12288),
    (16384, 4096),
)
Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def sides() -> dict[str, Norm]:
    """The implementations that this machine has."""
    found: dict[str, Norm] = {
        "eager": upstream_rms_norm,
        "compile": torch.compile(upstream_rms_norm, dynamic=False),
    }
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        print("liger_kernel is not installed")
    else:
        found["liger"] = lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)
    return found | {"ours": partial(cast_before_weight, eps=EPS)}


def main() -> None:
    """Measure every shape and record the results."""
    torch.manual_seed(0)
    copied = bandwidth()
    rows = [row for shape in SHAPES for row in measured(shape, copied)]
    record(
        "rms_norm_gpu",
        rows,
        copy_bytes_per_second=copied,
        host_milliseconds=steps(64, host_time),
        wall_milliseconds_16384_x_4096=steps(16384, wall_time),
    )


def steps(rows: int, timed: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """A forward and backward of ``rows`` x 4096 by every implementation."""
    x, weight = (torch.randn(size, device="cuda").bfloat16() for size in ((rows, 4096), (4096,)))
    dy = torch.randn_like(x)
    found = {name: timed(partial(step, side, [x, weight], [dy])) for name, side in sides().items()}
    print(f"{timed.__name__} of a forward and backward at {rows} x 4096, ms: {found}")
    return found


def measured(shape: tuple[int, int], copied: float) -> Iterator[Row]:
    """Forward and backward at one size."""
    torch._dynamo.reset()
    x, weight = (torch.randn(size, device="cuda").bfloat16() for size in (shape, shape[-1:]))
    dy = torch.randn_like(x)
    calls, backwards = {}, {}
    for name, side in sides().items():
        calls[name] = partial(without_grad, side, x, weight)
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        # Liger's backward writes into what it is given, so it gets a gradient of its own.
        incoming = dy.clone() if name == "liger" else dy
        backwards[name] = partial(torch.autograd.grad, side(*leaves), leaves, incoming, retain_graph=True)
    size = f"{shape[0]} x {shape[1]}"
    for part, moved, found in (("forward", 2, calls), ("backward", 3, backwards)):
        times = by_turns(found)
        moving = moved * x.nbytes
        shares = {name: moving / taken * 1e3 / copied for name, taken in times.items()}
        yield Row("rms_norm", part, "bfloat16", size, moving, times, shares)


def without_grad(side: Norm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One forward that keeps nothing."""
    with torch.no_grad():
        return side(x, weight)


if __name__ == "__main__":
    main()
