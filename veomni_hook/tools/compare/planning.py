"""Which processes of a run are planned (`veomni-hook plan`) instead of being recorded.

Every Python process of the run imports this, even if it trains nothing.
"""

from __future__ import annotations

from veomni_hook.tools.compare.plan import Plan, is_ordered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["attacher"]


def attacher(environ: Mapping[str, str]) -> Callable[[Plan], None] | None:
    """Return what plans in a process with this environment; None: it is recorded, or not observed."""
    plan = Plan.read(environ)
    if plan is None or not is_ordered(plan.folder):
        return None

    def attach(plan: Plan) -> None:
        from veomni_hook.tools.compare.planner import attach as attach_planner

        attach_planner(plan)

    return attach
