"""VeOmni's patches that apply on the installed release, run: `python -m scripts.veomni_runs`.

It needs torch, the package `veomni` and what it imports, and any release of transformers. Child processes
(`tests/veomni/newer.py`) build small models: plain ones, and ones with each config's patches that apply,
without and with idioms. A row for each config is printed; the sum goes between the markers in
docs/maintain/veomni-parity.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts import tables
from scripts.veomni_common import PAGE, ROOT, WRITTEN_FOR, child, wrapped
from veomni_hook.tools.cli.inputs.release import Releases

#: What the releases that are shown begin with in the page.
BEGIN = "<!-- written by python -m scripts.veomni_runs on {} -->\n"
SETTINGS = {"alone": {"IDIOMS": "0"}, "with idioms": {"IDIOMS": "1", "KERNELS": "torch"}}
GENERATE = "generate:"
#: The difference of numbers that are all smaller counts relative to this (`tests.veomni.sides.differences`).
LEAST = 1e-3

_PROGRAM = "tests.veomni.newer"

#: By setting and config: what `tests.veomni.newer.compared` returns.
Found = Mapping[str, Mapping[str, Mapping[str, Any]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every config on the installed release, print a row for each, and write the sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--written-for", default=WRITTEN_FOR, metavar="RELEASE", help="of the configs")
    parser.add_argument("--show", action="store_true", help="print the sum, write nothing")
    chosen = parser.parse_args(arguments)
    with Releases() as releases, tempfile.TemporaryDirectory(prefix="veomni-hook-") as folder:
        base = releases.get(chosen.written_for, "--written-for").folder
        found, missing = run(str(Path(base).parent), Path(folder))
    print("\n".join(rows(found)))
    release = version("transformers")
    lines = summed(found, missing, version("veomni"), release)
    if chosen.show:
        print("\n".join(["", *lines]))
    else:
        page = tables.placed(PAGE.read_text(encoding="utf-8"), BEGIN.format(release), lines)
        PAGE.write_text(page, encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}", file=sys.stderr)
    return 0


def run(base: str, folder: Path) -> tuple[Found, list[str]]:
    """Run the configs in child processes.

    Args:
        base: the folder with the release that they are made for.
        folder: where files may be written.

    Returns:
        What was found, and the names that VeOmni imports and the release does not have.

    Raises:
        SystemExit: a child failed.
    """
    from tests.veomni.sides import CONFIGS  # imports torch

    families = list(dict.fromkeys(family for family, _ in CONFIGS))
    file = str(folder / "plain.pt")
    cache = str(folder / "cache")
    child(_PROGRAM, "plain", file, *families, CACHE_DIR=cache)
    found: dict[str, dict[str, Any]] = {}
    missing: dict[str, None] = {}
    for setting, values in SETTINGS.items():
        for device in dict.fromkeys(device for _, device in CONFIGS):
            print(f"running {device} {setting}", file=sys.stderr, flush=True)
            named = [family for family, of in CONFIGS if of == device]
            settings = {**values, "DEVICE": device, "CACHE_DIR": cache}
            told = json.loads(child(_PROGRAM, base, file, device, *named, **settings))
            found.setdefault(setting, {}).update(told["found"])
            missing |= dict.fromkeys(told["missing"])
    return found, list(missing)


def rows(found: Found) -> Iterator[str]:
    """A line for each config: how many patches apply, are renamed and ran, and what each setting gave."""
    yield f"{'config':22} {'apply':>8} {'renamed':>7} {'ran':>4}  " + "  ".join(f"{s:24}" for s in found)
    for name, one in sorted(next(iter(found.values())).items()):
        counts = f"{len(one['applied'])} of {one['patches']}"
        verdicts = "  ".join(f"{_verdict(found[setting][name]['calls']):24}" for setting in found)
        yield f"{name:22} {counts:>8} {len(one['renamed']):7} {len(one['ran']):4}  {verdicts}".rstrip()


def summed(found: Found, missing: Sequence[str], veomni: str, release: str) -> list[str]:
    """Return the sums, and what is not as in plain models, as Markdown."""
    ones = next(iter(found.values())).values()
    patches = sum(one["patches"] for one in ones)
    applied, renamed, ran, added = (
        sum(len(one[key]) for one in ones) for key in ("applied", "renamed", "ran", "added")
    )
    calls = {setting: list(_calls(held)) for setting, held in found.items()}
    generated = sum(_is_generate(call) for held in calls.values() for call, _ in held)
    steps = sum(map(len, calls.values())) - generated
    lines = wrapped(
        f"On {release}, {applied} of the {patches} patches of VeOmni {veomni} apply, {renamed} of them with",
        f"renamed parameters. {steps} passes and {generated} runs of `generate` of the {len(ones)} configs.",
        *(_sum(setting, [told for _, told in held]) for setting, held in calls.items()),
    )
    lines.append("")
    idle = dict.fromkeys(target for one in ones for target in one["applied"] if target not in one["ran"])
    lines += wrapped(
        f"{ran} of the patches ran, {added} of them methods that VeOmni adds, called here without arguments.",
        f"Nothing calls the others: {', '.join(f'`{target}`' for target in idle)}." if idle else "",
        f"Empty classes stand in for {len(missing)} names, such as `{missing[0]}`." if missing else "",
    )
    lines.append("")
    for name, error in [*_differ(found), *_failed(found)]:
        lines += wrapped(f"- `{name}`: {' '.join(error.split())[:300]}.", indent="  ")
    return lines


def _failed(found: Found) -> dict[tuple[str, str], None]:
    """The methods that VeOmni adds and that fail, with the errors."""
    ones = [one for held in found.values() for one in held.values()]
    return dict.fromkeys(item for one in ones for item in one["added"].items() if item[1])


def _sum(setting: str, told: Sequence[Mapping[str, Any]]) -> str:
    """What the calls of one setting gave."""
    same = sum(not one for one in told)
    far = sum(bool(_far(one)) for one in told)
    largest = max((_relative(one) for one in told if not _far(one)), default=0.0)
    parts = [f"{same} with the same bits", f"{len(told) - same - far} within {largest:.0e}", f"{far} differ"]
    return f"{setting.capitalize()}: {', '.join(part for part in parts if not part.startswith('0 '))}."


def _calls(held: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for one in held.values():
        yield from one["calls"].items()


def _differ(found: Found) -> Iterator[tuple[str, str]]:
    """The call and what was wrong, once for the configs and settings that share it."""
    seen = {}
    for held in found.values():
        for call, told in _calls(held):
            if far := _far(told):
                what, value = next(iter(far.items()))
                seen[call, what] = (
                    value[-1] if isinstance(value, list) else f"off by {value['difference']:.1e}"
                )
    for (call, what), value in seen.items():
        yield call, value if what == "error" else f"{what}: {value}"


def _verdict(calls: Mapping[str, Mapping[str, Any]]) -> str:
    far = sum(bool(_far(told)) for told in calls.values())
    if far:
        return f"{far} of {len(calls)} differ"
    largest = max(map(_relative, calls.values()), default=0.0)
    return f"{len(calls)} equal, {largest:.1e}" if largest else f"{len(calls)} equal, same bits"


def _is_generate(call: str) -> bool:
    return call.partition("/")[2].startswith(GENERATE)


def _far(told: Mapping[str, Any]) -> dict[str, Any]:
    """What is not within the tolerance."""
    return {name: value for name, value in told.items() if not (isinstance(value, dict) and value["close"])}


def _relative(told: Mapping[str, Any]) -> float:
    """The largest difference, relative to what the tolerance is relative to."""
    return max((value["difference"] / max(value["scale"], LEAST) for value in told.values()), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
