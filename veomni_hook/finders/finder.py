"""The meta path finder: rejects non-targets in about a microsecond, and passes targets to the pipeline.

`import veomni_hook.install` loads only this module, `handle`, `state` and `targets`. So functions here import
what a target needs.
"""

from __future__ import annotations

import sys

from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import is_remote, is_target, is_target_if_named

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class PatchFinder:
    """Finds the patched form of targets and of modules that registered configs patch; ignores other names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the patched module, or None for a name that nothing patches.

        Raises:
            PatchError: a patch declared for this module does not apply.
            VeomniHookError: in strict mode, another finder took a target before this one was called.
        """
        if sys.meta_path[0] is not self and not STATE.looking and self in sys.meta_path:
            STATE.looking = True
            try:
                from veomni_hook.finders.bypassed import look_for_taken

                look_for_taken()
            finally:
                STATE.looking = False
        if not (is_target(fullname) or is_remote(fullname) or STATE.is_registered(fullname)):
            if not is_target_if_named(fullname) or (STATE.named is not None and not STATE.named):
                return None
            from veomni_hook.finders.config_text import is_named

            if not is_named(fullname):
                return None
        from veomni_hook.finders.pipeline import find_patched

        try:
            return find_patched(fullname, path, target)
        except Exception as error:
            from veomni_hook.finders.tracebacks import fold

            if not fold(error):
                raise
            raise error  # VEOMNI_TRACEBACK=full shows the frames of veomni_hook, too

    def __repr__(self) -> str:
        place = sys.meta_path.index(self) if self in sys.meta_path else None
        return f"<veomni_hook PatchFinder at meta_path[{place}]>"
