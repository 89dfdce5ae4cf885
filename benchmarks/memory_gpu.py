"""LoRA steps that save memory, ours beside Unsloth's: `python -m benchmarks.memory_gpu`.

The cases, sides' processes and checks are those of `lora_step_gpu`, with adapters in float32, PEFT's default.
Each side has a process of its own, and they alternate: a model that keeps everything, transformers'
gradient checkpointing, the setting ``memory``, and Unsloth's checkpointing, which moves what layers keep to
the host. Memory is the peak above the model. About 150 s and 110 GiB on an H200.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks._lora_worker import CASES, RANK
from benchmarks._record import RESULTS
from benchmarks.families_gpu import Process
from benchmarks.lora_step_gpu import Run, line

TARGET = "memory_gpu-cuda.json"
_OURS, _UNSLOTH = ("auto", "benchmarks._lora_worker"), ("none", "benchmarks._unsloth_worker")
_CHECKPOINTED = {"BENCH_CHECKPOINTED": "1"}
#: The sides: what each process runs, and with which variables.
SIDES: dict[str, tuple[tuple[str, str], dict[str, str]]] = {
    "eager": (("none", "benchmarks._lora_worker"), {}),
    "eager, checkpointed": (("none", "benchmarks._lora_worker"), _CHECKPOINTED),
    "unsloth": (_UNSLOTH, {}),
    "unsloth, checkpointed": (_UNSLOTH, _CHECKPOINTED),
    "ours": (_OURS, {}),
    "ours, checkpointed": (_OURS, _CHECKPOINTED),
    **{
        f"ours, {memory}": (_OURS, {"VEOMNI_MEMORY": memory})
        for memory in (
            "tiles",
            "checkpoint",
            "checkpoint,tiles",
            "checkpoint,offload",
            "checkpoint,offload,tiles",
        )
    },
}


def main() -> None:
    """Measure and record."""
    from veomni_hook.tools.bench.record import circumstances, write

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="beginnings of names")
    parser.add_argument("--sides", help="names, separated by semicolons")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / TARGET)
    options = parser.parse_args()
    names = options.sides.split(";") if options.sides else list(SIDES)
    if importlib.util.find_spec("unsloth") is None:
        names = [name for name in names if "unsloth" not in name]
    rows = []
    for name, case in CASES.items():
        if not case.float32 or not name.startswith(tuple(options.cases) or ""):
            continue
        began = time.perf_counter()
        run = Run(case, (), options.device)
        run.at = run.processes = {
            side: Process(*SIDES[side][0][:1], options.device, SIDES[side][0][1], SIDES[side][1])
            for side in names
        }
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run.build, names))
        run.facts = {side: run.facts[side] for side in names}
        run.compare()
        run.measure(explain=False)
        run.end()
        rows.append({"case": name, "sides": run.facts})
        print(line(name, run.facts), f"    after {time.perf_counter() - began:.0f} s", sep="\n", flush=True)
        shape = f"{case.family.batch} x {case.family.length}"
        write(
            circumstances("memory_gpu", options.device, rank=RANK, shape=shape) | {"cases": rows}, options.out
        )


if __name__ == "__main__":
    main()
