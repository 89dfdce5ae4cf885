"""Targets that were loaded without our finder: before it was active, or by another import hook ahead of it.

Python does not call a finder if an earlier one has already found the module. So whenever our finder is called
for any name while another is ahead of it on `sys.meta_path`, it looks for such modules: the next import that
the other hook does not handle reveals them. That may be any import of the program, so functions here import
what only a module that was found needs.
"""

from __future__ import annotations

import sys

from veomni_hook.errors import VeomniHookError
from veomni_hook.finders.log import warn_once
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import REMOTE_LOADING, is_remote, is_target, is_target_if_named

TYPE_CHECKING = False
if TYPE_CHECKING:
    from veomni_hook.finders.outcome import Outcome

__all__ = ["finders_ahead", "imported_before", "look_for_taken", "outcomes"]

# Another finder ahead of ours brings this module into every process. Settings and pipeline are imported in
# functions, so that only targets bring them.

_FIX = (
    "activate veomni_hook after it (import veomni_hook.install below the line that installs it): "
    "then both apply"
)


def finders_ahead() -> list[str]:
    """The class names of the finders that come before ours; empty if ours is not on `sys.meta_path`."""
    place = sys.meta_path.index(STATE.finder) if STATE.finder in sys.meta_path else 0
    return [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path[:place]]


def outcomes() -> dict[str, Outcome]:
    """The outcomes of the targets that were loaded without our finder, by name."""
    from veomni_hook.finders.outcome import Outcome
    from veomni_hook.finders.settings_in_force import current_settings

    remote = current_settings().remote_code
    names = [
        name
        for name in list(sys.modules)
        if name not in STATE.asked
        and (remote if is_remote(name) or name == REMOTE_LOADING else _is_target(name))
    ]
    ahead = ", ".join(finders_ahead())
    reason = "imported before the hook was active"
    if ahead:
        reason += f", or taken by a finder ahead of it on sys.meta_path ({ahead})"
    adopted = "; veomni_hook.adopt has patched models of it"
    return {
        name: Outcome(module=name, patched=False, reason=reason + (adopted if name in STATE.adopted else ""))
        for name in names
    }


def imported_before() -> list[str]:
    """Names of the loaded, unpatched modules that would be patched if they were imported now.

    Looks in the cache; on a miss, patches the module without executing it.
    """
    from veomni_hook.finders.already_imported import is_patched
    from veomni_hook.finders.patched_form import would_patch
    from veomni_hook.finders.settings_in_force import current_settings

    remote = current_settings().remote_code
    names = []
    for name, module in list(sys.modules.items()):
        if is_target(name) or (remote and is_remote(name)) or is_target_if_named(name):
            if not is_patched(module) and would_patch(name):
                names.append(name)
    return names


def look_for_taken() -> None:
    """Warn once per process if a target that would be patched was loaded without calling the finder.

    Raises:
        VeomniHookError: in strict mode.
    """
    names = list(sys.modules)
    seen = STATE.looked_at
    known = seen is not None and seen[0] <= len(names) and names[seen[0] - 1] == seen[1]
    STATE.looked_at = len(names), names[-1]
    fresh = names[seen[0] :] if known and seen is not None else names
    others = {*STATE.asked, *STATE.already_imported, REMOTE_LOADING}
    taken = [name for name in fresh if name not in others and _is_target(name)]
    if STATE.taken:
        STATE.taken.update(taken)
        return
    if not any(map(_would_be_patched, taken)):
        return
    from veomni_hook.finders.settings_in_force import current_settings

    what = (
        f"an import hook ahead of veomni_hook's ({', '.join(finders_ahead())}) loaded {', '.join(taken)}: "
        "modules that it loads stay unpatched"
    )
    if current_settings().strict:
        STATE.looked_at = None  # look again next time, in case the error is caught
        raise VeomniHookError(what, where="sys.meta_path", fix=_FIX)
    STATE.taken.update(taken)
    warn_once(f"{what}. Fix: {_FIX}", about="taken")


def _is_target(name: str) -> bool:
    if not is_target_if_named(name):
        return is_target(name)
    from veomni_hook.finders.config_text import is_named

    return is_named(name)


def _would_be_patched(name: str) -> bool:
    from veomni_hook.finders.patched_form import would_patch

    try:
        return would_patch(name)
    except VeomniHookError:
        return True  # it has patches that do not apply: not an error of the module being imported
