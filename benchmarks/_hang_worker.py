"""One of the processes of the part `hang` of `parallel_gpu`: the last one fails in the middle of a step."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

#: Steps that all processes take before one fails.
STEPS = 2


def main() -> None:
    """Train until the last process raises an error, or is killed, before the experts or MLP of a layer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("setting", choices=("sp=2", "ep=2"))
    parser.add_argument("how", choices=("raise", "kill"))
    parser.add_argument("failed", type=Path, help="gets the time at which the process fails")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    import veomni_hook

    veomni_hook.activate(parallel=options.setting)
    from benchmarks._parallel_worker import DENSE, EXPERTS, Job, dense, expert_models

    job = Job(argparse.Namespace(device=options.device, layers=2, lengths=None, sides=None, part="hang"))
    step: Any
    if options.setting == "sp=2":
        step = dense(job, job.layers)
        model = step.model
        ids = job.ids(job.shapes(DENSE)["vocab_size"], 1, 4096, 0)
    else:
        ((_, model),) = expert_models(job, {"ep": (job.world, "veomni")})
        ids = job.ids(job.shapes(EXPERTS)["vocab_size"], 1, 4096, job.rank)

        def step(setting: str, ids: Any) -> Any:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss

    def fail(*_: Any) -> None:
        options.failed.write_text(str(time.time()))
        if options.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError(f"rank {job.rank} fails in a layer")

    for number in range(STEPS + 1):
        if number == STEPS and job.rank == job.world - 1:
            model.model.layers[1].mlp.register_forward_pre_hook(fail)
        print(f"rank {job.rank}: loss {step(options.setting, ids).item():.3f}", flush=True)


if __name__ == "__main__":
    main()
