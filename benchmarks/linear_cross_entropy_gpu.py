"""Linear cross-entropy of upstream, torch.compile, Liger and ours on a CUDA device.

Run as `python -m benchmarks.linear_cross_entropy_gpu`. A step is forward and backward; the limit is the rate
of a large bfloat16 product in the same run, for the three products of the operation. Peak memory is the
allocator's in one step beyond the inputs, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from benchmarks._peers import Row, by_turns, record
from benchmarks._steps import step
from veomni_hook.kernels.linear_cross_entropy.triton import linear_cross_entropy

# Rows, hidden size, vocabulary.
SIZES = ((8192, 2048, 151936), (16384, 4096, 151936), (8192, 2560, 262144), (16384, 4096, 32000))
ROUNDS = 10
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LossRow(Row):
    """`bytes` is 0: what counts are `flops`, and `peak` GiB by implementation."""

    flops: int
    peak: dict[str, float]


def main() -> None:
    """Measure every size and record the results."""
    torch.manual_seed(0)
    rate = product_rate()
    print(f"a product of 8192 x 8192 x 8192: {rate / 1e12:.0f} TFLOP/s")
    rows = [measured(size, rate) for size in SIZES]
    record("linear_cross_entropy_gpu", rows, product_flops_per_second=rate)
    for row in rows:
        print(f"{row.shape:24}" + "".join(f"{name:>20} {gib:.2f} GiB" for name, gib in row.peak.items()))


def product_rate() -> float:
    """Return the operations a second of a large product."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    (median,) = by_turns({"product": lambda: torch.mm(a, b, out=out)}).values()
    return 2 * 8192**3 / median * 1e3


def sides(target: torch.Tensor) -> dict[str, Loss]:
    """The implementations that this machine has, for one target."""
    eager = partial(upstream, target=target)
    found: dict[str, Loss] = {"eager": eager, "compile": torch.compile(eager, dynamic=False)}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger
    except ImportError:
        print("liger_kernel is not installed")
    else:
        found["liger"] = lambda x, weight: Liger.apply(x, weight, target)[0]
        options = (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)
        found["liger float32"] = lambda x, weight: Liger.apply(x, weight, target, *options)[0]
    for name, accumulate in (("ours", "weight"), ("ours float32", "float32")):
        found[name] = partial(ours, target=target, accumulate=accumulate)
    return found


def upstream(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss as transformers computes it."""
    return functional.cross_entropy(functional.linear(x, weight).float(), target)


def ours(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, accumulate: str) -> torch.Tensor:
    """Our loss, with the weight's gradient summed in the dtype that ``accumulate`` says."""
    return linear_cross_entropy(x, weight, None, target, accumulate=accumulate)


def measured(size: tuple[int, int, int], rate: float) -> LossRow:
    """Every implementation at one size."""
    torch._dynamo.reset()
    rows, hidden, vocab = size
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    weight = (torch.randn(vocab, hidden, device="cuda") * 0.02).bfloat16()
    target = torch.randint(0, vocab, (rows,), device="cuda")
    steps = {name: partial(step, side, [x, weight], ()) for name, side in sides(target).items()}
    times = by_turns(steps, ROUNDS)
    peaks = {name: peak(side, [x, weight]) for name, side in steps.items()}
    flops = 6 * rows * hidden * vocab
    shares = {name: flops / taken * 1e3 / rate for name, taken in times.items()}
    name = " x ".join(map(str, size))
    return LossRow("lce", "forward and backward", "bfloat16", name, 0, times, shares, flops, peaks)


def peak(side: Callable[[], object], inputs: list[torch.Tensor]) -> float:
    """Return the most GiB that one step holds beside its inputs."""
    for tensor in inputs:
        tensor.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    side()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


if __name__ == "__main__":
    main()
