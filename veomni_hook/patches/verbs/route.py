"""Routes: what an idiom wants to write into one definition, spliced in as it is.

An idiom is this package's own code, so what is wrong with a route is an `IdiomError`, never a user's mistake.
"""

from __future__ import annotations

from veomni_hook.errors import IdiomError
from veomni_hook.patches.idioms.site import Site
from veomni_hook.patches.plan import Plan
from veomni_hook.patches.spec import PatchType

__all__ = ["plan_routes"]

_DEFECT = "report this as a defect of veomni-hook"


def plan_routes(plan: Plan) -> None:
    """Plan the splices of every route.

    Raises:
        IdiomError: a splice lies outside the top-level definition that the route names.
    """
    for index, step in plan.of_kind(PatchType.ROUTE.value):
        site = step.patch.site
        if site is None:
            raise TypeError(f"the route of {step.target} has no site")
        ranges = _holders(plan, site)
        for splice in site.splices:
            if not any(start <= splice.start and splice.end <= end for start, end in ranges):
                line = plan.document.lineno(splice.start)
                raise IdiomError(
                    f"{step} writes outside of it, at line {line}",
                    where=plan.where(index),
                    fix=_DEFECT,
                    target=site.target,
                )
            if splice.marker:
                plan.mark(index, splice.start, splice.text)
            else:
                plan.change(index, splice.start, splice.end, splice.text)


def _holders(plan: Plan, site: Site) -> list[tuple[int, int]]:
    """The ranges, in whole lines, of the top-level definitions that may hold the site."""
    document = plan.document
    owner = site.target.partition(".")[0]
    nodes = [definition.node for definition in document.find(owner)]
    return [
        (document.line_start(start), document.next_line(document.full_end(node)))
        for node in nodes
        for start, _ in [document.span(node)]
    ]
