"""The torch kernels beside the upstream code on a CUDA device: `python -m benchmarks.kernels_gpu`.

What `auto` may pick there is decided by this table. Both sides run by turns in one process, timed with CUDA
events; sizes are well over a millisecond and over the caches. Peak memory is the allocator's, of one step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from benchmarks._record import Case, write
from benchmarks._steps import EPS, step, upstream_gate, upstream_rms_norm
from veomni_hook.kernels.gated_mlp.torch import gated_silu
from veomni_hook.kernels.linear_cross_entropy.torch import linear_cross_entropy
from veomni_hook.kernels.rms_norm.torch import rms_norm
from veomni_hook.kernels.rotary.torch import rotary

ROUNDS = 20
Step = Callable[[], object]


def main() -> None:
    """Run every case and record the results."""
    torch.manual_seed(0)
    cases = [*_copy(), *_rms_norm(), *_rotary(), *_gated_mlp(), *_linear_cross_entropy()]
    write("kernels_gpu", torch.cuda.get_device_name(), cases)


def _copy() -> Iterator[Case]:
    """The ceiling: a copy of 1 GiB, both columns the same."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    yield _timed("copy", "2 GiB moved", torch.float32, "268435456", [lambda: target.copy_(source)] * 2)


def _rms_norm() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((32768, 4096), (131072, 1024), (4096, 32, 8, 128)):
            inputs = [_random(*shape, dtype=dtype), _random(shape[-1], dtype=dtype)]
            yield from _both("rms_norm", upstream_rms_norm, partial(rms_norm, eps=EPS), inputs)


def _rotary() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        given = [_random(4, 8192, heads, 128, dtype=dtype).transpose(1, 2) for heads in (32, 8)]
        cos, sin = (_random(1, 8192, 128, dtype=dtype) for _ in range(2))
        sides = (partial(function, cos=cos, sin=sin) for function in (apply_rotary_pos_emb, rotary))
        yield from _both("rotary", *sides, given)


def _gated_mlp() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((16384, 12288), (32768, 3072)):
            yield from _both(
                "gated_mlp", upstream_gate, gated_silu, [_random(*shape, dtype=dtype) for _ in range(2)]
            )


def _linear_cross_entropy() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for vocab, hidden, rows in ((32_000, 4096, 8192), (151_936, 1024, 8192), (151_936, 4096, 8192)):
            inputs = [_random(rows, hidden, dtype=dtype), _random(vocab, hidden, dtype=dtype) * 0.02]
            target = torch.randint(0, vocab, (rows,), device="cuda")
            sides = [
                partial(step, partial(function, target=target), inputs, ())
                for function in (_upstream_loss, _our_loss)
            ]
            shape = f"{rows} x {hidden} x {vocab}"
            yield _timed("linear_cross_entropy", "forward + backward", dtype, shape, sides)
            peaks = [_peak(side) for side in sides]
            yield Case(
                "linear_cross_entropy", "peak of a step", _name(dtype), shape, *peaks, *peaks, unit="MiB"
            )


def _upstream_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = functional.linear(x, weight)[None]
    return ForCausalLMLoss(logits, None, weight.shape[0], shift_labels=target[None])


def _our_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(x, weight, None, target)


def _both(
    op: str, upstream: Callable[..., object], ours: Callable[..., object], inputs: list[torch.Tensor]
) -> Iterator[Case]:
    shape = " x ".join(map(str, inputs[0].shape))
    with torch.no_grad():
        outputs = upstream(*inputs)
        forward: list[Step] = [partial(function, *inputs) for function in (upstream, ours)]
        yield _timed(op, "forward", inputs[0].dtype, shape, forward)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    incoming = [torch.randn_like(output) for output in outputs]
    steps = [partial(step, function, inputs, incoming) for function in (upstream, ours)]
    yield _timed(op, "forward + backward", inputs[0].dtype, shape, steps)


def _timed(op: str, part: str, dtype: torch.dtype, shape: str, sides: Sequence[Step]) -> Case:
    for _ in range(3):
        for side in sides:
            side()
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for side, taken in zip(sides, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            side()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
    best = [min(taken) for taken in times]
    middle = [statistics.median(taken) for taken in times]
    return Case(op, part, _name(dtype), shape, *best, *middle)


def _peak(step: Step) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
