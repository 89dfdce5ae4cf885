"""What recording, replaying and counting routes add to a training step: `python -m benchmarks.routing_gpu`.

The shapes of Qwen3-30B-A3B with 4 layers, 4 x 4,096 tokens, bfloat16, forward and backward with the hook.
Sides take turns within one process, in another order every round; each side's steps are waited for one by
one. "again" is a plain step once more: its distance from the first is the noise. A replayed step chooses
the experts that the plain one chose.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks._record import RESULTS

BATCH, LENGTH = 4, 4096
WARM, ROUNDS, STEPS = 3, 8, 4


def main() -> None:
    """Measure every side and record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS / "routing_gpu-cuda.json")
    options = parser.parse_args()
    import veomni_hook.install  # noqa: F401 - before transformers
    from veomni_hook.tools.bench.record import circumstances, write

    sides = measured(options)
    plain = sides["plain"]
    for name, each in sides.items():
        print(f"{name:24}{each:9.2f} ms {each / plain - 1:+8.2%}", flush=True)
    shape = f"Qwen3-30B-A3B, 4 layers, {BATCH} x {options.length}"
    facts = {"dtype": "bfloat16", "shape": shape, "steps": options.rounds * STEPS, "ms": sides}
    write(circumstances("routing_gpu", options.device) | facts, options.out)


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Return the median of each side's steps, in milliseconds."""
    import torch

    from benchmarks.qwen3_30b_a3b_step_gpu import VOCABULARY, model

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        trained = model(4).train()
        tokens = torch.randint(0, VOCABULARY, (BATCH, options.length))
    wait: Callable[[], object] = getattr(torch, options.device).synchronize

    def step() -> None:
        for each in trained.parameters():
            each.grad = None
        trained(input_ids=tokens, labels=tokens).loss.backward()

    sides = dict(_sides(trained, step))
    times: dict[str, list[float]] = {name: [] for name in sides}
    order, turns = list(sides), random.Random(0)
    for turn in range(WARM + options.rounds):
        turns.shuffle(order)
        for name in order:
            for _ in range(STEPS):
                wait()
                began = time.perf_counter()
                with sides[name]():
                    step()
                wait()
                if turn >= WARM:
                    times[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) * 1e3 for name, each in times.items()}


def _sides(
    model: Any, step: Callable[[], None]
) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    from veomni_hook.routing import monitor, record, replay

    with record(model) as routes:
        step()
    yield "plain", nullcontext
    yield "record", lambda: record(model)
    yield "record with weights", lambda: record(model, weights=True)
    yield "replay", lambda: replay(model, routes)
    yield "monitor", lambda: monitor(model)
    yield "monitor without entropy", lambda: monitor(model, entropy=False)
    yield "plain again", nullcontext


if __name__ == "__main__":
    main()
