"""Compare two locks of one project: changes that matter, changes worth a note, and the diffs."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from veomni_hook.layout import counted
from veomni_hook.tools.lock.inserted import lost, swapped
from veomni_hook.tools.lock.pairs import Placed, moved, pairs
from veomni_hook.tools.lock.records import Body, Lock, LockedModule, LockedSite, Override
from veomni_hook.tools.lock.renamed import Renamed, Renames
from veomni_hook.tools.lock.signatures import difference

__all__ = [
    "ARGUMENTS",
    "FORMULA",
    "GONE",
    "LINE",
    "MATTERS",
    "MOVED",
    "NEW",
    "NOT_OVERRIDDEN",
    "NOT_ROUTED",
    "PARAMETER",
    "RENAMED",
    "SIGNATURE",
    "TEXT",
    "Change",
    "compare",
]

GONE = "gone"
NOT_ROUTED = "no longer routed"
FORMULA = "formula changed"
SIGNATURE = "signature changed"
ARGUMENTS = "other arguments"
RENAMED = "renamed"
TEXT = "only text changed"
MOVED = "moved"
LINE = "other line"
NEW = "new"
NOT_OVERRIDDEN = "no longer overridden"

#: The kind of a row on a renamed parameter.
PARAMETER = "parameter"

#: Of a routed site; of an overridden body a changed signature matters too.
MATTERS = frozenset({GONE, NOT_ROUTED, FORMULA, ARGUMENTS})


@dataclass(frozen=True, slots=True)
class Change:
    """What changed for a site or an overridden body.

    Attributes:
        module: the module's name, as the lock has it; of a renamed parameter what its modules have in common.
        kind: the op of a site, the verb of an override.
        target: the upstream definition.
        result: what happened, one of this module's constants.
        detail: the same in a sentence.
        matters: whether a person must look at it.
        diffs: a unified diff for each of its definitions whose text changed.
        lines: the lines that changed beside renamed parameters; the same for changes that are alike.
    """

    module: str
    kind: str
    target: str
    result: str
    detail: str
    matters: bool
    diffs: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def diff(self) -> str:
        """The diffs of all definitions as one text; empty if no text changed."""
        return "".join(self.diffs)


def compare(old: Lock, new: Lock) -> list[Change]:
    """Compare a lock with the state of another release; unchanged entries are omitted.

    Args:
        old: the lock.
        new: current snapshots of the same modules, made with the bodies of the old lock as ``known``.

    Returns:
        The changes by module and target; sites on the same target are in source order.
    """
    shared = [
        (module, name, body, now.bodies[name])
        for module, before in old.modules.items()
        if (now := new.modules.get(module)) is not None
        for name, body in before.bodies.items()
        if name in now.bodies
    ]
    renames = Renames(shared)
    changes = [
        *_sites(old, new, renames),
        *_overrides(old, new, renames),
        *_renames(renames, new.transformers),
    ]
    return sorted(changes, key=lambda change: (change.module, change.target, change.kind))


def _renames(renames: Renames, release: str) -> Iterator[Change]:
    """A row for each renamed parameter, however many functions have it."""
    for one, places in renames.places().items():
        detail = f"{_said(one)} in {counted(len(places), 'signature')}; {one.remark(release)}"
        parts = zip(*(module.split(".") for module, _ in places), strict=False)
        package = ".".join(same[0] for same in takewhile(lambda same: len({*same}) == 1, parts))
        yield Change(package, PARAMETER, one.old, RENAMED, detail, matters=False)


def _said(one: Renamed) -> str:
    return f"{one.old} is {one.new} now" if one.declared else f"{one.old} is likely {one.new} now"


def _sites(old: Lock, new: Lock, renames: Renames) -> Iterator[Change]:
    before, after = _by_place(old), _by_place(new)
    gone: list[Placed] = []
    fresh: list[Placed] = []
    kept: list[tuple[Placed, Placed]] = []
    for place in dict.fromkeys((*before, *after)):
        same, lost, added = pairs(before.get(place, ()), after.get(place, ()))
        gone += lost
        fresh += added
        kept += same
    elsewhere = moved(gone, fresh)
    for one, other in (*kept, *elsewhere):
        yield from _site(old, new, one, other, renames)
    paired = {id(one) for pair in elsewhere for one in pair}
    yield from (_lost(old, new, one) for one in gone if id(one) not in paired)
    for one in fresh:
        if id(one) not in paired:
            detail = f"{one.site.variant} is routed here, and was not when the lock was written"
            yield Change(one.module, one.site.op, one.site.target, NEW, detail, matters=False)


def _by_place(lock: Lock) -> Mapping[tuple[str, str, str], Sequence[Placed]]:
    places: dict[tuple[str, str, str], list[Placed]] = defaultdict(list)
    for name, module in lock.modules.items():
        for site in module.sites:
            body = module.bodies.get(site.target)
            fingerprint = "" if body is None else body.fingerprint
            places[name, site.op, site.target].append(Placed(name, site, fingerprint))
    return places


def _site(old: Lock, new: Lock, one: Placed, other: Placed, renames: Renames) -> Iterator[Change]:
    """Compare a site with its new form."""
    first, second = old.modules[one.module].bodies, new.modules[other.module].bodies
    # Pairs of definitions: the target's first, the rest by name.
    bodies, now = one.site.bodies, other.site.bodies
    rest = sorted({*bodies[1:], *now[1:]})
    names = [*zip(bodies[:1], now[:1], strict=False), *((name, name) for name in rest)]
    changed = [(a, b) for a, b in names if not renames.are_all(first.get(a), second.get(b))]
    result, detail = _verdict(old, new, one.site, other.site, text_changed=bool(changed))
    if arguments := _arguments(one.site, other.site, first, second, renames):
        result, detail = result or ARGUMENTS, "; ".join([*arguments, *filter(None, [detail])])
    a, b = (first.get(names[0][0]), second.get(names[0][1])) if names else (None, None)
    if not result and a is not None and b is not None:
        if said := difference(a.signature, b.signature, _new_names(renames.of(a, b))):
            result, detail = SIGNATURE, f"{said}; what is routed computes the same"
    if not result and changed:
        result, detail = TEXT, "what is routed computes the same"
    if (one.module, one.site.target) != (other.module, other.site.target):
        place = f"{other.site.target} in {other.module}" if one.module != other.module else other.site.target
        result, detail = result or MOVED, f"it is now {place}; {detail}".rstrip("; ")
    elif not result and a is not None and b is not None and a.line != b.line:
        result, detail = LINE, f"line {a.line} is now {b.line}"
    if result:
        matters = result in MATTERS
        diffs = _diffs(old, new, one.module, other.module, changed or names)
        both = [(first[a], second[b]) for a, b in changed if a in first and b in second]
        lines = tuple(line for pair in both for line in renames.lines(*pair))
        yield Change(one.module, one.site.op, one.site.target, result, detail, matters, diffs, lines)


def _arguments(
    one: LockedSite,
    other: LockedSite,
    first: Mapping[str, Body],
    second: Mapping[str, Body],
    renames: Renames,
) -> list[str]:
    """What calls that a site inserts get otherwise than before."""
    said = [f"{one.op} lost its {name}" for name in lost(one.calls, other.calls)]
    before, after = first.get(one.target), second.get(other.target)
    if before is not None and after is not None:
        names = _new_names(renames.of(before, after)).get("", {})
        taken = re.findall(r"\w+", after.signature)
        said += [
            f"the {name} of {one.op} is {now}, and was {text}"
            for name, text, now in swapped(one.calls, other.calls, names, taken)
        ]
    return said


def _new_names(renamed: Mapping[str, Sequence[Renamed]]) -> dict[str, dict[str, str]]:
    return {function: {one.old: one.new for one in every} for function, every in renamed.items()}


def _verdict(
    old: Lock, new: Lock, one: LockedSite, other: LockedSite, *, text_changed: bool
) -> tuple[str, str]:
    if one.variant != other.variant:
        return FORMULA, f"it was {one.variant} and is {other.variant}"
    if one.form == other.form:
        return "", ""
    if old.engine == new.engine:
        return FORMULA, "it computes something else than before"
    if text_changed:  # digests of another veomni-hook are not comparable, so the text decides
        return (
            FORMULA,
            "its text changed, and the lock's digest is another veomni-hook's: it may compute the same",
        )
    return "", ""


def _lost(old: Lock, new: Lock, one: Placed) -> Change:
    site, module = one.site, new.modules.get(one.module)
    names = [(name, name) for name in site.bodies]
    if module is None:
        return Change(one.module, site.op, site.target, GONE, "the module is not there", matters=True)
    reason = module.unrouted.get((site.op, site.target))
    if reason is not None:
        diffs = _diffs(old, new, one.module, one.module, names)
        return Change(one.module, site.op, site.target, NOT_ROUTED, reason, matters=True, diffs=diffs)
    if site.target in module.bodies:
        diffs = _diffs(old, new, one.module, one.module, names)
        detail = f"{site.target} is there, but nothing in it looks like {site.op}"
        return Change(one.module, site.op, site.target, GONE, detail, matters=True, diffs=diffs)
    known = module.renamed.get(site.target)
    detail = f"the same code is now {known}, and not routed" if known else f"there is no {site.target}"
    return Change(one.module, site.op, site.target, GONE, detail, matters=True)


def _overrides(old: Lock, new: Lock, renames: Renames) -> Iterator[Change]:
    for name, module in old.modules.items():
        now = new.modules.get(name)
        overrides = now.overrides if now is not None else ()
        for one in module.overrides:
            if now is None or one in overrides:
                yield from _override(old, new, name, one, renames)
            else:
                detail = f"{one.config} does not patch it any more"
                yield Change(name, one.kind, one.target, NOT_OVERRIDDEN, detail, matters=False)
    for name, now in new.modules.items():
        known = old.modules[name].overrides if name in old.modules else ()
        for one in now.overrides:
            if one not in known:
                detail = f"{one.config} patches it, and did not when the lock was written"
                yield Change(name, one.kind, one.target, NEW, detail, matters=False)


def _override(old: Lock, new: Lock, module: str, one: Override, renames: Renames) -> Iterator[Change]:
    before = old.modules[module].bodies.get(one.target)
    now = new.modules.get(module, LockedModule())
    after = now.bodies.get(one.target)
    if before is None:
        return
    if after is None:
        known = now.renamed.get(one.target)
        detail = f"the same code is now {known}" if known else f"there is no {one.target}"
        yield Change(module, one.kind, one.target, GONE, f"{detail}; {one.config} patches it", matters=True)
        return
    renamed = renames.of(before, after)
    every = [*dict.fromkeys(name for names in renamed.values() for name in names)]
    result, detail = "", ""
    if said := difference(before.signature, after.signature, _new_names(renamed)):
        result, detail = SIGNATURE, said
    elif not renames.are_all(before, after):
        same = before.form and before.form == after.form
        result, detail = (
            (TEXT, "upstream computes the same") if same else (FORMULA, "upstream's code is another")
        )
    elif every:
        result, detail = RENAMED, every[0].remark(new.transformers)
    elif before.fingerprint != after.fingerprint:
        result, detail = TEXT, "upstream computes the same"
    elif before.line != after.line:
        result, detail = LINE, f"line {before.line} is now {after.line}"
    if result:
        detail = "; ".join([*map(_said, every), detail])
        # What upstream declares, patches follow, see `veomni_hook.patches.verbs`.
        bound = all(rename.declared for rename in every)
        matters = result in (SIGNATURE, FORMULA) or (result == RENAMED and not bound)
        remark = f"; {one.config} has to follow" if matters else ""
        diffs = _diffs(old, new, module, module, [(one.target, one.target)])
        yield Change(module, one.kind, one.target, result, detail + remark, matters, diffs)


def _diffs(
    old: Lock, new: Lock, old_module: str, new_module: str, names: Sequence[tuple[str, str]]
) -> tuple[str, ...]:
    """The unified diffs of definitions whose text changed."""
    first = old.modules[old_module].bodies
    second = new.modules[new_module].bodies if new_module in new.modules else {}
    diffs = []
    for one, other in names:
        a, b = first.get(one), second.get(other)
        lines = difflib.unified_diff(
            a.text if a else (),
            b.text if b else (),
            f"{old_module}:{one} (transformers {old.transformers})",
            f"{new_module}:{other} (transformers {new.transformers})",
            lineterm="",
        )
        diffs.append("".join(f"{line}\n" for line in lines))
    return tuple(diff for diff in diffs if diff)
