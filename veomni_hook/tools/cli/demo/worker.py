"""One side of the demo: a process that runs the training script, and takes a step when it is told to.

`python -m veomni_hook.tools.cli.demo.worker OUTPUT SCRIPT MODEL STEPS WAY...` runs the script once for each
way of training. After every optimizer step it prints `ready` and waits for a line on its standard input. In
each run the first step warms up, in the second one memory is measured, and the others are timed. The script
is observed from outside: it is the file that users run. At the end a JSON object is written to OUTPUT.
"""

from __future__ import annotations

import gc
import json
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from veomni_hook import accelerator
from veomni_hook.tools.cli.demo.shapes import Machine, Training

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Steps", "run"]

#: Tokens of a step, on a CPU and on an accelerator. Below 171 the logits of 49,152 tokens are few enough for
#: upstream's loss to be as fast.
SHORT, LONG = 176, 4096


class Steps:
    """Called after every optimizer step: ends its measurement, waits for the turn, begins the next one.

    Args:
        device: the torch device type that is trained on.
        wait: waits for the turn.

    Attributes:
        seconds: the times of the third and later steps.
        peak_bytes: the most that the second step held above what was held before it, its gradients included.
    """

    def __init__(self, device: str, wait: Callable[[], None]) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.peak_bytes = 0
        self._wait = wait
        self._count = 0
        self._began = 0.0
        self._memory = ExitStack()
        self._peak: Callable[[], int]

    def __call__(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """What torch calls after a step."""
        from veomni_hook.tools.bench.timing import recorded_peak

        there = accelerator.module(self.device)
        if there is not None:
            there.synchronize()
        self._count += 1
        if self._count > 2:
            self.seconds.append(time.perf_counter() - self._began)
        if self._count == 2:
            self._memory.close()
            self.peak_bytes = self._peak()
        # The next step starts without gradients, so that they are a part of what it allocates.
        optimizer.zero_grad()
        self._wait()
        if self._count == 1:
            self._peak = self._memory.enter_context(recorded_peak(self.device))
        self._began = time.perf_counter()


def run(script: str, model: str, steps: int, way: str) -> Training:
    """Run the script, and return what came of it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from veomni_hook.tools.compare.kernels import kernels_of

    device = accelerator.best()
    length = SHORT if device == "cpu" else LONG
    sys.argv = [script, model, "--way", way, "--steps", str(steps), "--length", str(length)]
    measured = Steps(device, _turn)
    hook = register_optimizer_step_post_hook(measured)
    try:
        left = runpy.run_path(script, run_name="__main__")
    finally:
        hook.remove()
    kernels = {(row["op"], row["backend"]) for row in kernels_of(left["model"]) if row["ran"]}
    return {
        "losses": left["losses"],
        "answer": left["answer"],
        "tokens": length,
        "parameters": sum(weight.numel() for weight in left["model"].parameters()),
        "model_type": left["model"].config.model_type,
        "step_seconds": measured.seconds,
        "peak_bytes": measured.peak_bytes,
        "kernels": sorted(pair for pair in kernels if pair[1] != "eager"),
    }


def machine() -> Machine:
    """Return the versions, the device and its threads."""
    import torch
    import transformers

    from veomni_hook.tools.compare.measures import device_name

    device = accelerator.best()
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": device,
        "device_name": "CPU" if device == "cpu" else device_name(device),
        "threads": torch.get_num_threads(),
    }


def _turn() -> None:
    print("ready", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("standard input has ended: nobody gives this run its turn")


def main(output: str, script: str, model: str, steps: int, ways: list[str]) -> None:
    """Run the script in every way, and write what came of it."""
    parts = {}
    for way in ways:
        parts[way] = run(script, model, steps, way)
        gc.collect()
    Path(output).write_text(json.dumps({**machine(), "parts": parts}), encoding="utf-8")


if __name__ == "__main__":
    _, _output, _script, _model, _steps, *_ways = sys.argv
    main(_output, _script, _model, int(_steps), _ways)
