"""The built-in config for what idioms found in one module: a route for every site with a kernel slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from veomni_hook.errors import IdiomError
from veomni_hook.patches.report import MissedSite
from veomni_hook.patches.site import Reason, Site, Status
from veomni_hook.patches.spec import ImportSpec, Patch, PatchConfig, PatchType, SlotSpec

__all__ = ["NAME", "missed", "routes"]

#: The name of the config that routes come from, in reports, headers and messages.
NAME = "veomni_hook.patches.idioms"
_SHOWN = 100


def routes(sites: Iterable[Site], module: str) -> PatchConfig | None:
    """Return the config that routes a module's sites to kernel slots; None if there is nothing to route.

    Args:
        sites: the sites that `recognise` found in the module.
        module: its name.

    Raises:
        IdiomError: two idioms give one slot different meanings.
    """
    routed = [site for site in sites if site.status in (Status.ROUTED, Status.REFUSED) and site.edits]
    if not routed:
        return None
    imports = dict.fromkeys(pair for site in routed for pair in site.imports)
    return PatchConfig(
        module,
        description="formulas that kernels compute, recognised by what they compute",
        patches=[
            Patch(PatchType.ROUTE, site.target, None, description=_described(site), site=site)
            for site in routed
        ],
        additional_imports=[ImportSpec(source, [name], origin=NAME) for source, name in imports],
        slots=_slots(routed, module),
        origin=NAME,
        label=NAME,
    )


def missed(sites: Iterable[Site]) -> tuple[MissedSite, ...]:
    """Return the candidates that no kernel is routed to, with the reasons."""
    left = [(site, Reason(site.reason)) for site in sites if site.status is not Status.ROUTED]
    return tuple(
        MissedSite(site.op, site.target, site.status.value, str(why), str(why.code), why.line)
        for site, why in left
    )


def _described(site: Site) -> str:
    captured = ", ".join(f"{name}={text}" for name, text in site.captures.items())
    if len(captured) > _SHOWN:
        captured = f"{captured[:_SHOWN]}..."
    return f"{site.op}/{site.variant}" + (f": {captured}" if captured else "")


def _slots(sites: Sequence[Site], module: str) -> list[SlotSpec]:
    slots: dict[str, tuple[SlotSpec, Site]] = {}
    for site in sites:
        for slot in site.slots:
            known, by = slots.setdefault(slot.name, (slot, site))
            if known != slot:
                raise IdiomError(
                    f"the slot {slot.name} is {known} for {by.op} of {by.target} "
                    f"and {slot} for {site.op} of {site.target}",
                    where=module,
                    fix="report this as a defect of veomni-hook",
                    target=site.target,
                )
    return [replace(slot, skips=_skips(name, sites)) for name, (slot, _) in slots.items()]


def _skips(name: str, sites: Sequence[Site]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The definitions that kernels of the slot ``name`` skip, by the place that asks."""
    found: dict[str, dict[str, None]] = {}
    for site in sites:
        if any(slot.name == name for slot in site.slots):
            for place, names in site.skips.items():
                found.setdefault(place, {}).update(dict.fromkeys(names))
    return tuple((place, tuple(names)) for place, names in found.items())
