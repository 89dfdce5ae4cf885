"""Sites whose code the module replaces later: recognised, but not the code that runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from veomni_hook.patches.routes.reliance import relied_on
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status

__all__ = ["settled"]


def settled(view: ModuleView, sites: Iterable[Site]) -> Iterator[Site]:
    """The sites; those that rely on code that the module may replace are missed, with the line as reason."""
    for site in sites:
        reason = _reason(view, site)
        if not reason or site.status is Status.REFUSED:
            yield site
        elif site.status is Status.MISSED:
            yield replace(site, reason=Reason.joined(filter(None, (site.reason, reason))))
        else:
            yield replace(
                site, status=Status.MISSED, variant="", reason=reason, captures={}, edits=(), slots=()
            )


def _reason(view: ModuleView, site: Site) -> str:
    scope = view.scope
    owner = site.target.rpartition(".")[0]
    if site.status is Status.MISSED and owner in scope.refused:
        why = Reason(scope.refused[owner], Code.REPLACED)
        return why if why not in site.reason else ""
    for name in _names(view, site) if scope.replaced else ():
        if line := scope.replaced.line(name, target=name == site.target):
            return Reason(f"{name} may be replaced at line {line}", Code.REPLACED)
    return ""


def _names(view: ModuleView, site: Site) -> Iterator[str]:
    """The names that a site relies on, its own first."""
    yield site.target
    yield from relied_on(view.document, site)
