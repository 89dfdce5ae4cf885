"""A training step of many model families: upstream, torch.compile, Liger, ours, and ours with torch.compile.

    python -m benchmarks.families_gpu                     # all families; about 20 minutes on an H200
    python -m benchmarks.families_gpu Qwen3-8B Granite    # those whose names begin so

All sides of a family alternate in one run: each library has a process of its own, and one works at a time
while times are taken. (First steps, which compile, run at once in all processes.) Times are medians: of steps
that are waited for, and of four that follow one another as in a training loop. Memory is the peak above the
model. "compile+masks" is upstream's code, compiled, with this package's patch of masks alone: without it,
transformers builds a causal mask while it is compiled. The floor is the time of the matrix products and the
attention that upstream's step has, one behind the other. Results of families that are not measured stay in
the file, with the date of their run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks._families import FAMILIES, Family
from benchmarks._record import RESULTS, record
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.settings import FORMATS

#: The sides that a process trains, by the name of the process.
PROCESSES = {
    "upstream": ("eager", "floor", "compile", "compile+graphs"),
    "masks": ("compile+masks",),
    "liger": ("liger",),
    "hook": ("ours", "ours+compile", "ours+graphs", *(f"ours+{name}" for name in FORMATS)),
    "layers": ("ours+layers+graphs",),
}
#: Those measured by default. Graphs (torch.compile's mode "reduce-overhead", of all or of each layer) help
#: steps that the host bounds, ``precision=float8`` (on Blackwell ``mxfp8``) those whose products are large.
SIDES = tuple(
    side for sides in PROCESSES.values() for side in sides if not side.endswith(("graphs", *FORMATS))
)
#: The processes with our kernels, and what others than these and upstream's run with.
OURS = ("hook", "layers")
KERNELS = {"masks": ",".join(f"{op}=eager" for op in registry.names())}
ROUNDS, STEPS = 3, 4
TARGET = "families_gpu-cuda.json"
CACHES = ("dynamic", "static")
#: The sides that decode; `generate` compiles by itself.
DECODES = ("eager", "liger", "ours")

#: What was measured, by side.
Facts = dict[str, dict[str, Any]]


class Process:
    """A worker and the pipe to it."""

    def __init__(
        self,
        kernels: str,
        device: str,
        worker: str = "benchmarks._family_worker",
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        command = [sys.executable, "-m", worker, kernels, device]
        # Liger searches tiles for its experts at every new shape, for minutes.
        environment = os.environ | {"LIGER_FUSED_MOE_AUTOTUNE": "0", **settings}
        self._worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer, which has ``error`` if it failed."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        try:
            print(json.dumps({"do": do, **request}), file=self._worker.stdin, flush=True)
            line = self._worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": "the process ended"}

    def end(self) -> None:
        """Close the pipe and wait."""
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        self._worker.wait()


def measured(
    family: Family,
    processes: dict[str, Process],
    sides: Sequence[str],
    *,
    profile: bool = False,
    trained: Mapping[str, Sequence[str]] = PROCESSES,
    rounds: int = ROUNDS,
    together: bool = True,
) -> Facts:
    """Return what each side of a family took in ``rounds`` turns; sides that cannot run have ``error``.

    ``trained`` lists the sides of each process. First steps run ``together`` in all processes, unless these
    have not enough memory for that.
    """
    at = {side: process for name, process in processes.items() for side in trained[name] if side in sides}

    def built(name: str) -> Facts:
        own = [side for side in trained[name] if side in at]
        return {side: at[side].ask("build", family=list(family), side=side) for side in own}

    began = time.perf_counter()
    with ThreadPoolExecutor(len(processes) if together else 1) as pool:
        facts = {side: one for part in pool.map(built, processes) for side, one in part.items()}
    print(f"first steps: {time.perf_counter() - began:.0f} s", end="", flush=True)
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in facts if "error" not in facts[side]}
    for _ in range(rounds):
        for side in turns:
            turns[side].append(at[side].ask("steps", side=side, number=STEPS))
    print(f", turns until {time.perf_counter() - began:.0f} s", end="", flush=True)
    for side, answers in turns.items():
        facts[side] |= summary(answers)
        if family.decode and side in DECODES:
            facts[side] |= {f"decode_{kind}": at[side].ask("decode", cache=kind) for kind in CACHES}
        if profile:
            facts[side] |= at[side].ask("profile", side=side)
    for process in processes.values():
        process.ask("drop")
    print(f", all until {time.perf_counter() - began:.0f} s", flush=True)
    return facts


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the range of all turns of a side, its memory and its recompilations."""
    failed = [answer for answer in answers if "error" in answer]
    if failed:
        return failed[0]
    times = [value for answer in answers for value in answer["ms"]]
    return {
        "step_ms": round(statistics.median(times), 2),
        "range_ms": [round(min(times), 2), round(max(times), 2)],
        "in_a_row_ms": round(statistics.median(answer["in_a_row_ms"] for answer in answers), 2),
        "extra_gib": round(max(answer["extra_gib"] for answer in answers), 2),
        "recompilations": sum(answer["recompilations"] for answer in answers),
    }


def line(name: str, facts: Facts) -> str:
    """Return a family's milliseconds and GiB of every side, and what its compiled sides did."""
    return "\n    ".join([name, *(f"{side:13}{described(one)}" for side, one in facts.items())])


def described(one: dict[str, Any]) -> str:
    """Return a side's results in words."""
    if "error" in one:
        return str(one["error"])
    words = [f"{one['step_ms']:8.1f} ms, in a row {one['in_a_row_ms']:6.1f}, {one['extra_gib']:6.1f} GiB"]
    if "loss" in one:
        words.append(f"loss {one['loss']:.4f}")
    if "graph_breaks" in one:
        words.append(
            f"first step {one['first_step_s']:.0f} s, {one['graph_breaks']} graph breaks,"
            f" {one['recompilations']} recompilations"
        )
    for kind in CACHES:
        if (decoded := one.get(f"decode_{kind}")) is not None:
            words.append(f"{kind} cache {decoded.get('tokens_per_s', decoded.get('error'))} tokens/s")
    return ", ".join(words)


def chosen(names: list[str]) -> dict[str, Family]:
    """Return the families that ``names`` are or begin, in their order; all families if there are none."""
    found: dict[str, Family] = {}
    for name in names or [""]:
        known = [name] if name in FAMILIES else [one for one in FAMILIES if one.startswith(name)]
        if not known:
            raise SystemExit(f"no family is called {name}; known: {', '.join(FAMILIES)}")
        found |= {one: FAMILIES[one] for one in known}
    return found


def changed(family: Family, options: argparse.Namespace) -> Family:
    """Return a family with as many sequences and layers as the command line says."""
    fields = family.fields | ({"num_hidden_layers": options.layers} if options.layers else {})
    return family._replace(fields=fields, batch=options.batch or family.batch)


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="beginnings of names")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--kernels", default="auto", help="what ours runs with")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, help="sequences of a step, in place of the families' own")
    parser.add_argument("--layers", type=int, help="of each model, likewise")
    parser.add_argument("--apart", action="store_true", help="first steps one by one: they need less memory")
    parser.add_argument("--profile", type=Path, help="a JSON file for the kernels of a step of each side")
    parser.add_argument("--out", type=Path, default=RESULTS / TARGET)
    options = parser.parse_args()
    sides = options.sides.split(",")
    processes = {
        name: Process(
            options.kernels if name in OURS else KERNELS.get(name, "none"),
            options.device,
        )
        for name, own in PROCESSES.items()
        if set(own) & set(sides)
    }
    kernels = {}
    for name, family in chosen(options.families).items():
        family = changed(family, options)  # noqa: PLW2901
        facts = measured(
            family, processes, sides, profile=options.profile is not None, together=not options.apart
        )
        print(line(name, facts), flush=True)
        kernels[name] = {side: one.pop("kernels", []) for side, one in facts.items()}
        if options.profile is not None:
            options.profile.write_text(json.dumps(kernels))
        shape = f"{family.batch} x {family.length}"
        row = {"family": name, "shape": shape, "layers": family.fields["num_hidden_layers"], "sides": facts}
        record("families_gpu", options.device, options.out, FAMILIES, row)
    for process in processes.values():
        process.end()


if __name__ == "__main__":
    main()
