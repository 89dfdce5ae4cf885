"""A page about a live model: the modules of its classes, with what really ran in them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.kernels.explain.rows import Row, grouped
from veomni_hook.patches.report import PatchReport
from veomni_hook.releases import installed
from veomni_hook.tools.report.gather import gathered, unpatched
from veomni_hook.tools.report.model import Answer, Module, Place
from veomni_hook.tools.report.whole import whole

__all__ = ["live_page"]

_NOT_SEEN = "the hook did not load it. It was imported before activation, or the hook is switched off"
_NOT_OURS = "It asks kernel slots, but the hook of this process did not load it: its patches are not known."


def live_page(subject: str, rows: Sequence[Row], modules: Sequence[str], *, notes: Sequence[str] = ()) -> str:
    """Return the page about what `veomni_hook.explain` found in a model or modeling module.

    ``modules`` are the modeling modules of ``subject``; ``notes`` are further sentences below the figures.

    Sources are read now, from the files that were imported; if a package was replaced since then, the page
    shows lines that were not imported.
    """
    shown = [_module(name, rows) for name in modules]
    title = f"{subject}: patches, and what ran"
    lead = "What ran at each place, with the calls that were counted; where nothing ran yet, what would."
    if not shown:
        notes = [*notes, "None of its classes is from a modeling module, so there is nothing to patch."]
    return whole(title, lead, shown, live=True, notes=notes)


def _module(name: str, rows: Sequence[Row]) -> Module:
    module = sys.modules.get(name)
    outcome = STATE.outcomes.get(name)
    label = name.rpartition(".")[2].removeprefix("modeling_")
    # The text that was executed; for remote code, ``__file__`` is the original's.
    read: Any = getattr(getattr(module, "__loader__", None), "get_source", None)
    stored = None if read is None else read(name)
    own = [row for row in rows if row.module == name]
    if module is None or outcome is None or not outcome.patched or stored is None:
        reason = outcome.reason if outcome is not None and outcome.reason else _NOT_SEEN
        package = name.partition(".")[0]
        said = _NOT_OURS if own else f"Upstream's code runs unchanged: {reason}."
        return unpatched(name, label, f"{package} {installed(package) or ''}".rstrip(), said)
    original = None
    with suppress(OSError):  # the file is gone
        original = decode_source(Path(outcome.origin).read_bytes())
    report = PatchReport.from_dict(outcome.report)
    return gathered(
        label,
        original,
        stored,
        report,
        outcome.patch_hash,
        lambda place: _answers(place, own),
        examined=current_settings().idioms,
    )


def _answers(place: Place, rows: Iterable[Row]) -> list[Answer]:
    """What the modules that ask a slot at a place got; modules with the same answer are grouped."""
    asking = [
        row for row in rows if row.slot == place.slot and (not row.asked_in or place.target in row.asked_in)
    ]
    return [
        Answer(
            group.backend,
            group.why,
            f"{group.kind} x{group.places}",
            group.calls or "none counted",
            training=group.training,
        )
        for group in grouped(asking)
    ]
