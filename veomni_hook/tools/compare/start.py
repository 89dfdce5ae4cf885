"""Waits in a Python process for its import of torch, and then records it, or plans its first step.

Every Python process of the run imports this, even if it trains nothing.
"""

from __future__ import annotations

import os
import sys

from veomni_hook.tools.compare.plan import Plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = ["install"]


def install(attach: Callable[[Plan], None] | None = None) -> None:
    """Record or plan this process, or call ``attach``, when it has imported torch; not without a plan."""
    plan = Plan.read(os.environ)
    if plan is not None and "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchFinder(lambda: (attach or _attach)(plan)))


def _attach(plan: Plan) -> None:
    if plan.order is not None:
        from veomni_hook.tools.compare.planner import Planner

        Planner(plan).observation.begin()
    else:
        from veomni_hook.tools.compare.observer import attach

        attach(plan)


class _TorchFinder:
    """Finds torch through the other finders, and calls back when it has been imported."""

    def __init__(self, imported: Callable[[], None]) -> None:
        self._imported = imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's own spec, with a loader that calls back once; None for every other name."""
        if fullname != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        # The loader object stays the same; only one attribute is replaced, for one call.
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._imported()

        loader.exec_module = exec_module
        return spec
