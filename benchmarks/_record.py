"""Where benchmarks keep what they measured, and the file of those that measure families or cases."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_LISTS = {"family": "families", "case": "cases"}


def record(
    benchmark: str, device: str, out: Path, order: Iterable[str], row: Mapping[str, Any], **more: Any
) -> None:
    """Write a row into the file, with the date; rows that were not measured stay.

    Args:
        benchmark: the script's name.
        device: where it ran.
        out: the file.
        order: the names of all rows, as the file has them.
        row: begins with ``family`` or ``case``, and its name.
        more: what else the file says of the last run.
    """
    from veomni_hook.tools.bench.record import circumstances, write

    kind, name = next(iter(row.items()))
    known = json.loads(out.read_text())[_LISTS[kind]] if out.exists() else []
    now = circumstances(benchmark, device, dtype="bfloat16", **more)
    rows = {one[kind]: one for one in known} | {name: {kind: name, "date": now["date"], **row}}
    write(now | {_LISTS[kind]: [rows[key] for key in order if key in rows]}, out)
