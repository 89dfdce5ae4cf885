"""The meta path finder: rejects non-targets in about a microsecond, and passes targets to the pipeline.

`import veomni_hook.install` loads only this module and the handle, so it imports nothing heavy.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PREFIX = "transformers.models."
REMOTE_PREFIX = "transformers_modules."
REMOTE_LOADING = "transformers.dynamic_module_utils"
SHARED = frozenset(
    (
        "transformers.configuration_utils",
        "transformers.modeling_layers",
        "transformers.modeling_utils",
        REMOTE_LOADING,
    )
)


def is_target(fullname: str) -> bool:
    """Whether a name is a transformers modeling module, or one of the few that all models share.

    The file name does not follow from the family: eight modeling files are not `modeling_<family>`.
    """
    if fullname.startswith(PREFIX):
        return fullname.rpartition(".")[2].startswith("modeling_")
    return fullname in SHARED


def is_remote(fullname: str) -> bool:
    """Whether a name is a module of remote code, `transformers_modules.*`."""
    return fullname.startswith(REMOTE_PREFIX)


class PatchFinder:
    """Finds the patched form of target modules; ignores every other name.

    Attributes:
        registered: names of other modules that configs registered in this process patch.
        looking: whether it is currently looking for targets that other hooks took, which imports modules.
        patterns: tests, one per registered config with a pattern, whether a name matches that pattern.
        unsettled: targets served unpatched because a module that their configs need was being imported, with
            that module's name; they are imported again once it is complete.
    """

    def __init__(self) -> None:
        self.registered: frozenset[str] = frozenset()
        self.patterns: tuple[Callable[[str], bool], ...] = ()
        self.looking = False
        self.unsettled: dict[str, str] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the patched module, or None for a name that nothing patches.

        Raises:
            PatchError: a patch declared for this module does not apply.
            VeomniHookError: in strict mode, another finder took a target before this one was called.
        """
        if sys.meta_path[0] is not self and not self.looking and self in sys.meta_path:
            self._look_for_taken()
        if self.unsettled:
            from veomni_hook.finders import pipeline

            pipeline.settle(self)
        if not (
            is_target(fullname)
            or is_remote(fullname)
            or fullname in self.registered
            or (self.patterns and any(applies(fullname) for applies in self.patterns))
        ):
            return None
        from veomni_hook.finders import pipeline

        try:
            return pipeline.find_patched(self, fullname, path, target)
        except Exception as error:
            from veomni_hook.finders.tracebacks import fold

            if not fold(error):
                raise
            raise error  # VEOMNI_TRACEBACK=full shows the frames of veomni_hook, too

    def _look_for_taken(self) -> None:
        self.looking = True
        try:
            from veomni_hook.finders import bypassed

            bypassed.look(self)
        finally:
            self.looking = False

    def __repr__(self) -> str:
        place = sys.meta_path.index(self) if self in sys.meta_path else None
        return f"<veomni_hook PatchFinder at meta_path[{place}]>"
