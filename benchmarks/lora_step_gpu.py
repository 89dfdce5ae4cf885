"""A LoRA step of PEFT, of Unsloth and of ours: `python -m benchmarks.lora_step_gpu`.

    python -m benchmarks.lora_step_gpu            # all cases; about 300 s and some 110 GiB on an H200
    python -m benchmarks.lora_step_gpu Qwen3-8B   # those whose names begin so

r = 16, 4 layers, 2 x 4,096 tokens, models in bfloat16, adapters in bfloat16 and in float32, which is PEFT's
default. `torch.compile`'s first steps take most of the time: unless ``--sides`` names it, it takes part where
adapters are float32. Each case is written as soon as it is measured; results of cases that are not measured
stay in the file, with the date of their run.

Unsloth takes part where it can be imported (`peers.sh`). Its `FastLanguageModel` loads what `save_pretrained`
saved; its settings are its defaults, but for 16 bits and no gradient checkpointing.

All sides of a case alternate in one run. Each case has a process with upstream's code, which trains ``eager``
and ``compile``, one with the hook and one with Unsloth. All processes stand ready before the first time is
taken, and then one works at a time. Losses and norms of gradients are compared before; a side whose are not
upstream's is not timed. Times are medians: of steps that are waited for, and of some that follow one another
as in a training loop. Memory is the peak above the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._lora_worker import CASES, RANK, Case
from benchmarks._record import RESULTS, record
from benchmarks.families_gpu import Facts, Process, summary

#: The sides that a process trains, by the name of the process.
PROCESSES = {"upstream": ("eager", "compile"), "hook": ("ours",), "unsloth": ("unsloth",)}
SIDES = tuple(side for sides in PROCESSES.values() for side in sides)
ROUNDS, STEPS = 2, 4
TARGET = "lora_step_gpu-cuda.json"
#: How far from upstream's loss and norms of gradients may be: in bfloat16, tokens change experts.
OF_LOSS, OF_NORMS = 2e-3, 2e-2
#: What the processes run, and with which kernels.
_STARTED = {
    "upstream": ("none", "benchmarks._lora_worker"),
    "hook": ("auto", "benchmarks._lora_worker"),
    "unsloth": ("none", "benchmarks._unsloth_worker"),
}


class Run:
    """A case and its processes."""

    def __init__(self, case: Case, sides: Sequence[str], device: str) -> None:
        wanted = {name: [side for side in own if side in sides] for name, own in PROCESSES.items()}
        self.case = case
        self.processes = {}
        for name in (name for name, own in wanted.items() if own):
            kernels, worker = _STARTED[name]
            self.processes[name] = Process(kernels, device, worker)
        self.at = {side: self.processes[name] for name in self.processes for side in wanted[name]}
        self.facts: Facts = {}

    def build(self, side: str) -> None:
        """Run the first step of a side."""
        self.facts[side] = self.at[side].ask("build", family=list(self.case), side=side)

    def compare(self) -> None:
        """Give an error to every side whose loss or gradients are not those of eager."""
        norms = {side: one.pop("norms") for side, one in self.facts.items() if "norms" in one}
        eager = self.facts.get("eager", {})
        for side in norms if "eager" in norms else ():
            one, theirs = self.facts[side], norms["eager"]
            one["adapters"] = len(norms[side])
            if norms[side].keys() != theirs.keys():
                one["error"] = f"{side} has {len(norms[side])} gradients, eager {len(theirs)}"
                continue
            off = sorted(_off(norms[side][name], theirs[name]) for name in theirs)
            one["norms_off"] = {"median": off[len(off) // 2], "most": off[-1]}
            for key, difference, most in (
                ("loss", _off(one["loss"], eager["loss"]), OF_LOSS),
                ("norm of all gradients", _off(one["gradient_norm"], eager["gradient_norm"]), OF_NORMS),
                ("median of the gradients' norms", one["norms_off"]["median"], OF_NORMS),
            ):
                if not difference <= most:  # NaN as well
                    one["error"] = f"the {key} is off by {difference:.1e} of eager's"

    def measure(self, *, explain: bool = True) -> None:
        """Measure the sides by turns, and ask what ran if ``explain``."""
        turns: dict[str, list[dict[str, Any]]] = {
            side: [] for side, facts in self.facts.items() if "error" not in facts
        }
        for _ in range(ROUNDS):
            for side, answers in turns.items():
                answers.append(self.at[side].ask("steps", side=side, number=STEPS))
        for side, answers in turns.items():
            self.facts[side] |= summary(answers)
        if explain and "ours" in turns:
            self.facts["ours"] |= self.at["ours"].ask("explain")

    def end(self) -> None:
        """End the processes."""
        for process in self.processes.values():
            process.end()


def sides_of(case: Case) -> tuple[str, ...]:
    """Return the sides that a case has unless others are named."""
    missing = set() if case.float32 else {"compile"}
    if importlib.util.find_spec("unsloth") is None:
        missing.add("unsloth")
    return tuple(side for side in SIDES if side not in missing)


def measured(
    cases: dict[str, Case], sides: Sequence[str] | None, device: str, out: Path | None = None
) -> dict[str, Facts]:
    """Return what each side of each case took; sides that cannot run have ``error``.

    ``sides`` are those of every case, or None. With ``out``, each case is written there as soon as it is
    measured.
    """
    began = time.perf_counter()
    runs = {name: Run(case, sides or sides_of(case), device) for name, case in cases.items()}
    # Upstream's steps need most memory: the eager ones wait for one another, the compiled ones fit together.
    for side, at_once in (("ours", True), ("unsloth", True), ("eager", False), ("compile", True)):
        _first_steps(runs.values(), side, at_once=at_once)
        print(f"first steps of {side} until {time.perf_counter() - began:.0f} s", flush=True)
    for name, run in runs.items():
        run.facts = {side: run.facts[side] for side in SIDES if side in run.facts}
        run.compare()
        run.measure()
        run.end()
        if out is not None:
            shape = f"{run.case.family.batch} x {run.case.family.length}"
            row = {"case": name, "shape": shape, "sides": run.facts}
            record("lora_step_gpu", device, out, CASES, row, rank=RANK)
        print(line(name, run.facts), f"    until {time.perf_counter() - began:.0f} s", sep="\n", flush=True)
    return {name: run.facts for name, run in runs.items()}


def _off(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def _first_steps(runs: Iterable[Run], side: str, *, at_once: bool) -> None:
    having = [run for run in runs if side in run.at]
    with ThreadPoolExecutor(max(1, len(having)) if at_once else 1) as pool:
        list(pool.map(lambda run: run.build(side), having))


def line(name: str, facts: Facts) -> str:
    """Return a case's milliseconds and GiB of every side."""
    rows, wide = [name], max(map(len, facts))
    for side, one in facts.items():
        if "error" in one:
            rows.append(f"    {side:{wide}} {one['error']}")
            continue
        rows.append(
            f"    {side:{wide}} {one['step_ms']:8.1f} ms, in a row {one['in_a_row_ms']:6.1f},"
            f" {one['extra_gib']:6.2f} GiB, loss {one['loss']:.5f}, gradients {one['gradient_norm']:.5f}"
            + (
                f" (each off by {off['median']:.1e}, at most {off['most']:.1e})"
                if (off := one.get("norms_off"))
                else ""
            )
        )
        rows += [f"             {words}" for words in one.get("explain", [])]
    return "\n".join(rows)


def chosen(names: Sequence[str]) -> dict[str, Case]:
    """Return the cases that the names begin; all if there are none."""
    found = {name: case for name, case in CASES.items() if name.startswith(tuple(names) or "")}
    if not found:
        raise SystemExit(f"no case begins with {' or '.join(names)}; known: {', '.join(CASES)}")
    return found


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="beginnings of names")
    parser.add_argument("--sides", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / TARGET)
    options = parser.parse_args()
    sides = options.sides.split(",") if options.sides else None
    measured(chosen(options.cases), sides, options.device, options.out)
    print(f"written: {options.out.name}")


if __name__ == "__main__":
    main()
