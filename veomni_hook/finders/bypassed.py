"""Targets that bypassed the finder: another import hook, installed after this one, took them.

Python does not call a finder if an earlier one has already found the module. So whenever this finder is
called for any name while another is ahead of it on `sys.meta_path`, it looks for such modules: the next
import that the other hook does not handle reveals them.
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
    """The class names of the finders that come before ours."""
    place = sys.meta_path.index(finder) if finder in sys.meta_path else 0
    return [getattr(each, "__name__", type(each).__name__) for each in sys.meta_path[:place]]


def look(finder: PatchFinder) -> None:
    """Warn once per process if a target that would be patched was loaded without calling the finder.

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
        f"an import hook ahead of veomni_hook's ({', '.join(ahead_of(finder))}) loaded {', '.join(taken)}: "
        "modules that it loads stay unpatched"
    )
    if current_settings().strict:
        STATE.looked_at = None  # look again next time, in case the error is caught
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
        return True  # it has patches that do not apply: not an error of the module being imported
