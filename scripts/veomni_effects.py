"""What VeOmni's patches are for, measured with them and with this package.

    python -m scripts.veomni_effects theirs FOLDER    # with VeOmni, on the release that it is made for
    python -m scripts.veomni_effects ours FOLDER      # on that release and on newer ones, without VeOmni

The first command writes what small models of VeOmni's generated modules give to FOLDER. The second compares,
and writes the installed release's part of veomni_hook/tools/migration/measured.json. The probes are in
tests/veomni/effects.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts import tables
from scripts.veomni_common import ROOT, child
from tests.veomni.configurations import CONFIGURATIONS
from veomni_hook.tools.migration import vocabulary as words
from veomni_hook.tools.migration.answers import NUMBERS, RAN

MEASURED = ROOT / "veomni_hook" / "tools" / "migration" / "measured.json"
FIX = "veomni_hook.patches.fixes.router_in_float32"
#: How much of an error's text is kept.
WIDTH = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what one side gives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=("theirs", "ours"))
    parser.add_argument("folder", type=Path, help="where VeOmni's numbers are")
    parser.add_argument("--families", nargs="*", help="folders of VeOmni; all if not given")
    parser.add_argument("--show", action="store_true", help="print what was measured, write nothing")
    chosen = parser.parse_args(arguments)
    folders = chosen.families or [*CONFIGURATIONS]
    if chosen.side == "theirs":
        chosen.folder.mkdir(parents=True, exist_ok=True)
        _run("theirs", str(chosen.folder / "theirs.pt"), "gpu", *folders)
        (chosen.folder / "waits.json").write_text(_run("waits", "theirs", *_seeing(folders)))
        return 0
    families = {folder: CONFIGURATIONS[folder][0] for folder in folders}
    results = {families[name]: row for name, row in measure(chosen.folder, folders).items()}
    if chosen.show:
        print(json.dumps(results, indent=1))
        return 0
    known = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    row = {**known.get(version("transformers"), {}), **results}
    MEASURED.write_text(written({**known, version("transformers"): row}), encoding="utf-8")
    return 0


def written(releases: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of measured.json: a line for each model."""
    blocks = []
    for release, models in releases.items():
        rows = [
            f" {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in sorted(models.items())
        ]
        blocks.append(f"{json.dumps(release)}: {{\n" + ",\n".join(rows) + "\n}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def measure(place: Path, folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run all probes on the installed release: by folder of VeOmni what `answers` reads."""
    theirs = str(place / "theirs.pt")
    their_waits = json.loads((place / "waits.json").read_text())
    with tempfile.TemporaryDirectory(prefix="veomni-hook-") as temporary:
        plain = str(Path(temporary) / "plain.pt")
        torch_kernels = {"KERNELS": "torch", "SPEECH": "0"}
        _run("ours", "plain", theirs, plain, *folders, HOOK="0")
        probes = json.loads(_run("ours", "ours", theirs, plain, *folders, **torch_kernels))
        fixed = json.loads(_run("ours", "numerics", theirs, plain, *folders, PATCHES=FIX, **torch_kernels))
        waits = json.loads(_run("waits", "ours", *_seeing(folders)))
        ranks = json.loads(_run("ranks", "all", theirs, temporary, *folders, **torch_kernels))
    rows = {}
    for folder in folders:
        probe = probes[folder]
        row: dict[str, Any] = {NUMBERS: _first(probe[NUMBERS])}
        ran = (key.rpartition(" ")[2].partition("/")[0] for key, lack in probe["slots"].items() if not lack)
        row[RAN] = sorted(set(ran))
        row[words.NUMERICS] = fixed[folder][words.NUMERICS]
        for concern in (
            words.LOG_PROBS,
            words.POSITION_IDS,
            words.PACKING,
            words.ROUTER_REPLAY,
            words.EXCLUSION,
        ):
            row[concern] = _first(probe[concern])
        row[words.ROUTER_MONITOR] = row[words.ROUTER_REPLAY]
        row[words.SEQUENCE_PARALLEL] = _first(ranks["sequence"][folder])
        row[words.EXPERT_PARALLEL] = _first(ranks["experts"][folder])
        row[words.FSDP] = _first({name: ranks["sharded"][folder].get(name, "") for name in ("", "text")})
        row[words.DUMMY_FORWARD] = _first(ranks["sharded"][folder])
        if folder in waits:
            row[words.HOST_SYNC], row[words.COLLATOR] = _more_waits(waits[folder], their_waits[folder]), ""
            row[words.COLLATOR] = waits[folder].get("error", "")
            row[words.DUMMY_FORWARD] = row[words.DUMMY_FORWARD] or _without_gradients(waits[folder])
        wanted = {NUMBERS, RAN, *_concerns(CONFIGURATIONS[folder][0])}
        rows[folder] = {concern: result for concern, result in row.items() if concern in wanted}
    return rows


def _concerns(family: str) -> set[str]:
    """What VeOmni's patches of a model are for."""
    return {
        row["concern"] for row in tables.read("veomni-parity") if row["config"].rpartition("_")[0] == family
    }


def _first(results: Mapping[str, str]) -> str:
    """What the first probe that failed says, with what it looked at."""
    texts = (f"{what}: {lack}".lstrip(": ").splitlines()[0] for what, lack in results.items() if lack)
    return next((text[:WIDTH] for text in texts), "")


def _more_waits(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    if "error" in ours or "error" in theirs:
        return str(ours.get("error") or f"VeOmni: {theirs['error']}")
    counts = [side["media"]["forward"] + side["media"]["backward"] for side in (ours, theirs)]
    return (
        "" if counts[0] <= counts[1] else f"{counts[0]} waits, VeOmni {counts[1]}: {ours['media']['where']}"
    )


def _without_gradients(ours: Mapping[str, Any]) -> str:
    lost = ours.get("without gradients", [])
    return f"no gradient of {', '.join(lost[:3])} in a batch of text" if lost else ""


def _seeing(folders: Sequence[str]) -> list[str]:
    from tests.veomni.inputs import SEES

    return [folder for folder in folders if folder in SEES]


def _run(module: str, *arguments: str, **settings: str) -> str:
    print("running", module, *arguments[:1], file=sys.stderr, flush=True)
    return child(f"tests.veomni.effects.{module}", *arguments, **settings)


if __name__ == "__main__":
    sys.exit(main())
