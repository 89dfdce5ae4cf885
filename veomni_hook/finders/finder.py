"""The meta path finder: says no in about a microsecond, and hands everything else to the pipeline.

This module is all that `import veomni_hook.install` loads besides the handle, so it imports nothing heavy.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PREFIX = "transformers.models."


def is_target(fullname: str) -> bool:
    """Whether a name is a transformers modeling module, `transformers.models.*.modeling_*`.

    The family does not name the file: eight modeling files are not `modeling_<family>`.
    """
    return fullname.startswith(PREFIX) and fullname.rpartition(".")[2].startswith("modeling_")


class PatchFinder:
    """Finds the patched form of target modules; every other name is none of its business.

    Attributes:
        registered: names outside `transformers.models` that configs registered in this process patch.
    """

    def __init__(self) -> None:
        self.registered: frozenset[str] = frozenset()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the patched module, or None for a name that nothing patches.

        Raises:
            PatchError: a patch that was declared for this module does not apply.
        """
        if not is_target(fullname) and fullname not in self.registered:
            return None
        from veomni_hook.finders import pipeline

        return pipeline.find_patched(self, fullname, path, target)

    def __repr__(self) -> str:
        place = sys.meta_path.index(self) if self in sys.meta_path else None
        return f"<veomni_hook PatchFinder at meta_path[{place}]>"
