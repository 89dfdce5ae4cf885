"""The torch kernels beside the upstream code on this CPU: `python -m benchmarks.kernels_cpu [--quick]`.

Both sides run by turns in one process; the table shows medians, the file the best as well. Peak memory is
what torch's allocator handed out at most during one step, on top of what was there before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

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

DTYPES = (torch.float32, torch.bfloat16)
Step = Callable[[], object]


def main() -> None:
    """Run every case and record the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and no vocabulary of 151,936")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rounds = 5 if arguments.quick else 11
    ops = (_rms_norm(rounds), _rotary(rounds), _gated_mlp(rounds))
    loss = _linear_cross_entropy(rounds, largest=not arguments.quick)
    write("kernels_cpu", "cpu", chain(*ops, loss))


def _rms_norm(rounds: int) -> Iterator[Case]:
    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, EPS)

    for dtype in DTYPES:
        for shape in ((2, 1024, 1024), (1, 2048, 4096), (2, 512, 16, 128)):
            inputs = [torch.randn(shape, dtype=dtype), torch.rand(shape[-1], dtype=dtype)]
            yield from _both("rms_norm", upstream_rms_norm, ours, inputs, rounds)


def _rotary(rounds: int) -> Iterator[Case]:
    for dtype in DTYPES:
        for batch, heads, length in ((1, 16, 512), (2, 16, 1024), (1, 32, 4096)):
            given = (
                torch.randn(batch, length, n, 128, dtype=dtype).transpose(1, 2) for n in (heads, heads // 2)
            )
            cos, sin = torch.randn(2, 1, length, 128).to(dtype)
            upstream = partial(apply_rotary_pos_emb, cos=cos, sin=sin)
            yield from _both("rotary", upstream, partial(rotary, cos=cos, sin=sin), list(given), rounds)


def _gated_mlp(rounds: int) -> Iterator[Case]:
    for dtype in DTYPES:
        for shape in ((1, 2048, 3072), (2, 2048, 8192)):
            inputs = [torch.randn(shape, dtype=dtype) for _ in range(2)]
            yield from _both("gated_mlp", upstream_gate, gated_silu, inputs, rounds)


def _linear_cross_entropy(rounds: int, *, largest: bool) -> Iterator[Case]:
    sizes = [(384, 256, 2048), (32_000, 256, 256), (32_000, 256, 1024)]
    for dtype in DTYPES:
        for vocab, hidden, rows in sizes + [(151_936, 512, 512), (151_936, 1024, 2048)] * largest:
            inputs = [torch.randn(rows, hidden).to(dtype), (torch.randn(vocab, hidden) * 0.02).to(dtype)]
            target = torch.randint(0, vocab, (rows,))

            def upstream(
                x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor = target
            ) -> torch.Tensor:
                logits = functional.linear(x, weight)[None]
                return ForCausalLMLoss(logits, None, weight.shape[0], shift_labels=target[None])

            def ours(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor = target) -> torch.Tensor:
                return linear_cross_entropy(x, weight, None, target)

            turns = rounds if vocab < 10_000 else 3
            shape = f"{rows} x {hidden} x {vocab}"
            steps = [partial(step, function, inputs, ()) for function in (upstream, ours)]
            yield _timed("linear_cross_entropy", "forward + backward", inputs[0].dtype, shape, steps, turns)
            if vocab > 10_000:
                yield _peaks("linear_cross_entropy", inputs, shape, steps)


def _both(
    op: str,
    upstream: Callable[..., object],
    ours: Callable[..., object],
    inputs: list[torch.Tensor],
    rounds: int,
) -> Iterator[Case]:
    shape = " x ".join(map(str, inputs[0].shape))
    with torch.no_grad():
        outputs = upstream(*inputs)
        forward: list[Step] = [partial(function, *inputs) for function in (upstream, ours)]
        yield _timed(op, "forward", inputs[0].dtype, shape, forward, rounds)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    incoming = [torch.randn_like(output) for output in outputs]
    steps = [partial(step, function, inputs, incoming) for function in (upstream, ours)]
    yield _timed(op, "forward + backward", inputs[0].dtype, shape, steps, rounds)


def _timed(op: str, part: str, dtype: torch.dtype, shape: str, sides: Sequence[Step], rounds: int) -> Case:
    for side in sides:
        side()
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for side, taken in zip(sides, times, strict=True):
            started = time.perf_counter()
            side()
            taken.append((time.perf_counter() - started) * 1e3)
    best = [min(taken) for taken in times]
    middle = [statistics.median(taken) for taken in times]
    return Case(op, part, str(dtype).removeprefix("torch."), shape, *best, *middle)


def _peaks(op: str, inputs: Sequence[torch.Tensor], shape: str, sides: Sequence[Step]) -> Case:
    peaks = []
    for side in sides:
        for tensor in inputs:
            tensor.grad = None
        peaks.append(peak_bytes(side) / 2**20)
    return Case(
        op, "peak of a step", str(inputs[0].dtype).removeprefix("torch."), shape, *peaks, *peaks, unit="MiB"
    )


def peak_bytes(step: Step) -> int:
    """Return the most bytes that torch's CPU allocator held during ``step`` on top of those before it."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


if __name__ == "__main__":
    main()
