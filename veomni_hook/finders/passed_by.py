"""Targets that never asked the finder: another import hook, installed after this one, took them.

Nobody asks a finder that stands behind another one which answers. So the finder looks for such modules
whenever it is asked for any name while another stands ahead of it on `sys.meta_path`: the next import that
the other hook leaves alone shows them.
"""

from __future__ import annotations

import sys

from veomni_hook.errors import VeomniHookError
from veomni_hook.finders.finder import REMOTE_LOADING, PatchFinder, is_target
from veomni_hook.finders.log import warn_once
from veomni_hook.finders.state import STATE

__all__ = ["ahead_of", "look"]

_FIX = (
    "activate veomni_hook after it (import veomni_hook.install below the line that installs it): "
    "then both apply"
)


def ahead_of(finder: PatchFinder | None) -> list[str]:
    """The finders that are asked before ours, by their classes' names."""
    place = sys.meta_path.index(finder) if finder in sys.meta_path else 0
    return [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path[:place]]


def look(finder: PatchFinder) -> None:
    """Warn once a process if a target that would be patched was loaded without asking the finder.

    Raises:
        VeomniHookError: in strict mode.
    """
    names = list(sys.modules)
    seen = STATE.looked_at
    known = seen is not None and seen[0] <= len(names) and names[seen[0] - 1] == seen[1]
    STATE.looked_at = len(names), names[-1]
    fresh = names[seen[0] :] if known and seen is not None else names
    taken = [name for name in fresh if _was_taken(name)]
    if STATE.taken:
        STATE.taken.update(taken)
        return
    if not any(map(_would_be_patched, taken)):
        return
    from veomni_hook.finders.handle import current_settings

    what = (
        f"an import hook ahead of veomni_hook's ({', '.join(ahead_of(finder))}) took {', '.join(taken)}: "
        "what it takes stays unpatched"
    )
    if current_settings().strict:
        STATE.looked_at = None  # once more next time, should somebody catch this
        raise VeomniHookError(what, where="sys.meta_path", fix=_FIX)
    STATE.taken.update(taken)
    warn_once(f"{what}. Fix: {_FIX}", about="taken")


def _was_taken(name: str) -> bool:
    asked = name in STATE.asked or name in STATE.early
    return is_target(name) and name != REMOTE_LOADING and not asked


def _would_be_patched(name: str) -> bool:
    from veomni_hook.finders.pipeline import would_patch

    spec = getattr(sys.modules.get(name), "__spec__", None)
    try:
        return spec is not None and would_patch(name, spec)
    except VeomniHookError:
        return True  # it has patches, which do not apply: no error of the module that is imported just now
