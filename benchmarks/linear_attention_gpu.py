"""Linear attention of Qwen3-Next: one layer, and a training step of four layers of the whole model.

    python -m benchmarks.linear_attention_gpu --fla /tmp/fla:/tmp/triton

Sides take turns in one run, each in a process of its own: upstream's fallback in PyTorch, upstream with
flash-linear-attention, and ours. ``--fla`` names what its process has on its path: the package, and on Hopper
a Triton from 3.7.1 on (`peers.sh` packs both); no other process may have them. Without it that side is left
out. The layer's "loss" is the norm of its output.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks._families import FAMILIES, Family
from benchmarks._record import RESULTS
from benchmarks.families_gpu import ROUNDS, Process, line, measured

#: The sides that a process trains, by the name of the process.
PROCESSES = {"upstream": ("fallback",), "fla": ("fla",), "hook": ("ours",)}
WORKER = "benchmarks._layer_worker"
TARGET = "linear_attention_gpu-cuda.json"
_MODEL = FAMILIES["Qwen3-Next-80B-A3B (128 experts)"]
CASES = {
    "GatedDeltaNet layer": Family(_MODEL.model_type, _MODEL.fields | {"alone": True}, batch=1, length=16384),
    "four layers": _MODEL,
}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="beginnings of names")
    parser.add_argument("--fla", help="folders with flash-linear-attention and its Triton")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / TARGET)
    options = parser.parse_args()
    from veomni_hook.tools.bench.record import circumstances, write

    path = os.pathsep.join(filter(None, (options.fla, os.environ.get("PYTHONPATH"))))
    settings = {"fla": {"PYTHONPATH": path}}
    processes = {
        name: Process("auto" if name == "hook" else "none", options.device, WORKER, settings.get(name, {}))
        for name in PROCESSES
        if name != "fla" or options.fla
    }
    sides = [side for name in processes for side in PROCESSES[name]]
    rows = []
    for name, case in CASES.items():
        if any(name.startswith(one) for one in options.cases or [""]):
            facts = measured(case, processes, sides, trained=PROCESSES, rounds=options.rounds, together=False)
            print(line(name, facts), flush=True)
            rows.append({"case": name, "shape": f"{case.batch} x {case.length}", "sides": facts})
    for process in processes.values():
        process.end()
    write(
        circumstances("linear_attention_gpu", options.device) | {"dtype": "bfloat16", "cases": rows},
        options.out,
    )


if __name__ == "__main__":
    main()
