"""Match sites of two snapshots: by place, and across places by what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from veomni_hook.patches.code.nearest_names import distance
from veomni_hook.tools.lock.records import LockedSite

__all__ = ["Placed", "moved", "pairs"]

_NEAR = 0.4


@dataclass(frozen=True, slots=True)
class Placed:
    """A site, the name of its module, and the fingerprint of the definition that contains it."""

    module: str
    site: LockedSite
    fingerprint: str = ""


def pairs(
    old: Sequence[Placed], new: Sequence[Placed]
) -> tuple[list[tuple[Placed, Placed]], list[Placed], list[Placed]]:
    """Pair the sites of one op on one target.

    Returns:
        Pairs (those that compute the same first, the others in source order), unmatched old sites, and
        unmatched new sites.
    """
    paired: list[tuple[Placed, Placed]] = []
    gone, fresh = list(old), list(new)
    for one in old:
        other = next((candidate for candidate in fresh if _formula(candidate) == _formula(one)), None)
        if other is not None:
            paired.append((one, other))
            gone.remove(one)
            fresh.remove(other)
    count = min(len(gone), len(fresh))
    paired += zip(gone[:count], fresh[:count], strict=True)
    return paired, gone[count:], fresh[count:]


def moved(gone: Sequence[Placed], fresh: Sequence[Placed]) -> list[tuple[Placed, Placed]]:
    """Pair sites that are gone with new ones that compute the same: renamed in their module, or elsewhere.

    Many modules share one formula, so in another module the name must match too; if the whole module is gone,
    a similar name is enough.
    """
    left = {one.module for one in gone}
    modules_gone = left - {one.module for one in fresh}
    ranked = sorted(
        (one.module != other.module, distance(one.site.target, other.site.target), index, at)
        for index, one in enumerate(gone)
        for at, other in enumerate(fresh)
        if _may_be(one, other, module_gone=one.module in modules_gone)
    )
    place_of: dict[int, int] = {}
    for _, _, index, at in ranked:
        if index not in place_of and at not in place_of.values():
            place_of[index] = at
    return [(gone[index], fresh[at]) for index, at in place_of.items()]


def _may_be(one: Placed, other: Placed, *, module_gone: bool) -> bool:
    """Whether a site computes the same as one that is gone, and its place or its name fits."""
    same_code = one.site.form == other.site.form != "" or one.fingerprint == other.fingerprint != ""
    if _formula(one)[:2] != _formula(other)[:2] or not same_code:
        return False
    if one.module == other.module or one.site.target == other.site.target:
        return True
    near = distance(one.site.target, other.site.target) <= len(one.site.target) * _NEAR
    return module_gone and near


def _formula(one: Placed) -> tuple[str, str, str]:
    return one.site.op, one.site.variant, one.site.form
