"""What the hook costs an import: `python -m benchmarks.import_time [--rounds N]`.

Every quantity is measured in fresh interpreters, by turns with its baseline, and reported as the best. A
module's import is a repeated in-process re-import of that one module: what it imports stays loaded.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

from benchmarks._harness import Row, finish, in_fresh_interpreter, timed

MODULES = {
    "qwen3": "transformers.models.qwen3.modeling_qwen3",
    "qwen3_vl": "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "qwen3_omni_moe": "transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe",
}
# Named as a user's configs are: two of the modules have no built-in spec.
PATCHES = "benchmarks._patches"
FRESH_IMPORT = """
import json, sys, time
started = time.perf_counter()
import {module}
seconds = time.perf_counter() - started
print(json.dumps([seconds, sorted({{"torch", "transformers"}} & set(sys.modules))]))
"""
INTERPRETERS = 15  # each takes some 30 ms
CALLS = 1000


def install_row() -> Row:
    """Import `veomni_hook.install` and, as the baseline, `argparse` in fresh interpreters by turns."""
    ours, theirs = [], []
    for _ in range(INTERPRETERS):
        seconds, heavy = in_fresh_interpreter(["-c", FRESH_IMPORT.format(module="veomni_hook.install")])
        if heavy:
            raise SystemExit(f"import veomni_hook.install loads {heavy}")
        ours.append(seconds)
        theirs.append(in_fresh_interpreter(["-c", FRESH_IMPORT.format(module="argparse")])[0])
    return Row(
        "import veomni_hook.install, fresh interpreter",
        min(ours) * 1e3,
        "ms",
        min(theirs) * 1e3,
        "import argparse",
        budget=10,
    )


def module_rows(family: str, rounds: int) -> list[Row]:
    """Measure one module's import in processes of their own."""
    with tempfile.TemporaryDirectory() as cache:
        worker = ["-m", "benchmarks.import_time", "--family", family, "--cache", cache, "--worker"]
        measured = in_fresh_interpreter([*worker, "reimport", "--rounds", str(rounds)])
        first = min(in_fresh_interpreter([*worker, "first"])["first"] for _ in range(5))
    unpatched, cold, warm = (measured[name] * 1e3 for name in ("unpatched", "cold", "warm"))
    per_thousand = cold / measured["lines"] * 1e3
    added = measured["added"] * 1e3
    baseline = (unpatched, f"unpatched import of modeling_{family}")
    return [
        Row(f"{family}: warm", warm, "ms", *baseline, budget=1, judged=added),
        Row(f"{family}: one-off of the first patched module", first * 1e3 - warm, "ms", *baseline, budget=30),
        Row(f"{family}: cold, {measured['lines']} lines", cold, "ms", *baseline),
        Row(f"{family}: cold, per 1,000 lines", per_thousand, "ms", budget=100),
    ]


def reimport(module: str) -> float:
    """Return the seconds of importing one module anew."""
    sys.modules.pop(module, None)
    return timed(lambda: importlib.import_module(module))


def measure_reimports(module: str, rounds: int, cache: str) -> dict[str, float]:
    """Worker: unpatched, cold and warm re-imports of one module by turns, in seconds; fills the cache."""
    from veomni_hook import activate

    importlib.import_module(module)
    upstream = Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8")
    times: dict[str, list[float]] = {"unpatched": [], "cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as empty_caches:
        for turn in range(rounds):
            times["unpatched"].append(reimport(module))
            del sys.modules[module]
            with activate(cache_dir=cache, patches=PATCHES) as handle:
                reimport(module)  # opens settings and cache: the one-off cost, measured on its own
                times["warm"].append(reimport(module))
                expect(handle, module, "hit")
                del sys.modules[module]
            if turn % 5 == 0:
                with activate(cache_dir=str(Path(empty_caches, str(turn))), patches=PATCHES) as handle:
                    times["cold"].append(reimport(module))
                    expect(handle, module, "miss")
                    del sys.modules[module]
    # The best of many: what a shared machine adds is never negative, and it was seen to double whole phases.
    best = {name: min(values) for name, values in times.items()}
    return {**best, "added": best["warm"] - best["unpatched"], "lines": len(upstream.splitlines())}


def measure_first(module: str, cache: str) -> dict[str, float]:
    """Worker: the first patched import of a process, from a filled cache, in seconds."""
    from veomni_hook import activate

    importlib.import_module(module)
    reimport(module)
    del sys.modules[module]
    with activate(cache_dir=cache, patches=PATCHES) as handle:
        first = reimport(module)
        expect(handle, module, "hit")
    return {"first": first}


def expect(handle: object, module: str, cache: str) -> None:
    """Stop when an import did not take the way that is being measured."""
    outcome = handle.status().modules[module]  # type: ignore[attr-defined]
    if not (outcome.patched and outcome.cache == cache):
        raise SystemExit(f"{module}: expected a patched import with a cache {cache}, got {outcome!r}")


def find_spec_rows() -> list[Row]:
    """Measure what the finder adds to the search for modules that are none of its business."""
    measured = in_fresh_interpreter(["-m", "benchmarks.import_time", "--worker", "find_spec"])
    without, with_hook, direct = (measured[name] * 1e6 for name in ("without", "with", "direct"))
    name = f"{CALLS:,} unrelated find_spec calls"
    return [
        Row(f"{name}: importlib's whole search", with_hook, "µs", without, "without the hook"),
        Row(f"{name}: our finder alone, each", direct, "µs", without, "importlib's search", budget=2),
    ]


def measure_find_spec(rounds: int) -> dict[str, float]:
    """Worker: seconds of one call each, for names that exist nowhere."""
    from veomni_hook import activate

    roots = [f"none_{number}" for number in range(CALLS)]
    # The finder alone also sees names that begin as a target's does.
    names = [f"transformers.models.{root}" if number % 2 else root for number, root in enumerate(roots)]
    times: dict[str, list[float]] = {"without": [], "with": [], "direct": []}
    for _ in range(rounds):
        times["without"].append(timed(lambda: [importlib.util.find_spec(name) for name in roots]))
        with activate():
            finder = sys.meta_path[0].find_spec
            times["with"].append(timed(lambda: [importlib.util.find_spec(name) for name in roots]))
            started = time.perf_counter()
            for name in names:
                finder(name, None)
            times["direct"].append(time.perf_counter() - started)
    return {name: min(values) / CALLS for name, values in times.items()}


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=25, help="re-imports of each module")
    parser.add_argument("--worker", choices=["reimport", "first", "find_spec"], help=argparse.SUPPRESS)
    parser.add_argument("--family", choices=MODULES, help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Workers activate where transformers is imported already: what a module imports must stay loaded.
    warnings.filterwarnings("ignore", "imported too early to be patched")
    if options.worker is None:
        families = [row for family in MODULES for row in module_rows(family, options.rounds)]
        finish("import_time", [install_row(), *families, *find_spec_rows()])
    elif options.worker == "find_spec":
        print(json.dumps(measure_find_spec(options.rounds)))
    elif options.worker == "first":
        print(json.dumps(measure_first(MODULES[options.family], options.cache)))
    else:
        print(json.dumps(measure_reimports(MODULES[options.family], options.rounds, options.cache)))


if __name__ == "__main__":
    main()
