"""What batch invariance costs a training step: `python -m benchmarks.batch_invariance_gpu [FAMILY...]`.

Sides take turns in one run, each in a process of its own: upstream's code, the same with the operators of the
package batch-invariant-ops (its products, log-softmax and mean replace torch's; attention stays torch's),
ours, and ours with `VEOMNI_DETERMINISTIC=batch_invariant`. A side that cannot run says why.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks._family_worker import Worker, serve
from benchmarks._record import RESULTS
from benchmarks.families_gpu import Process, chosen, line, measured

DEFAULT = ["Qwen3-8B", "Qwen3-30B-A3B"]
#: The sides that a process trains, by the name of the process, and what is set for the process.
PROCESSES = {
    "upstream": ("eager",),
    "published": ("eager+published",),
    "hook": ("ours",),
    "invariant": ("ours+invariant",),
}
SETTINGS = {"invariant": {"VEOMNI_DETERMINISTIC": "batch_invariant"}}
PUBLISHED = "published"


class WithPublished(Worker):
    """A worker whose torch has the operators of batch-invariant-ops."""

    def build(self, family: list[object], side: str) -> dict[str, object]:
        """Replace torch's operators and run the first step."""
        from batch_invariant_ops import enable_batch_invariant_mode

        enable_batch_invariant_mode()
        return super().build(family, side)


def processes_for(device: str) -> dict[str, Process]:
    """Start a process for each side."""
    found = {}
    for name in PROCESSES:
        kernels = "auto" if name in {"hook", "invariant"} else "none"
        worker = __spec__.name if name == PUBLISHED else "benchmarks._family_worker"
        found[name] = Process(kernels, device, worker, SETTINGS.get(name, {}))
    return found


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=DEFAULT, help="beginnings of names")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "batch_invariance_gpu-cuda.json")
    options = parser.parse_args()
    from veomni_hook.tools.bench.record import circumstances, write

    processes = processes_for(options.device)
    sides = [side for own in PROCESSES.values() for side in own]
    rows = []
    for name, family in chosen(options.families).items():
        # One after the other: two of them take upstream's memory.
        facts = measured(family, processes, sides, trained=PROCESSES, rounds=options.rounds, together=False)
        print(line(name, facts), flush=True)
        rows.append({"family": name, "shape": f"{family.batch} x {family.length}", "sides": facts})
        now = circumstances("batch_invariance_gpu", options.device) | {"dtype": "bfloat16"}
        write(now | {"families": rows}, options.out)
    for process in processes.values():
        process.end()


if __name__ == "__main__":
    import sys

    # As a worker it gets its kernels and its device.
    serve(WithPublished) if sys.argv[1:2] == ["none"] else main()
