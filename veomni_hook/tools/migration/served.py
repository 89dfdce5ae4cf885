"""Each patch of a config against the source of one release: does its target exist, and is it the same code?

Every patch is judged on its own, so that one that no longer fits does not hide the others.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from veomni_hook.patches.code.document import Definition, Document, plain
from veomni_hook.patches.code.nearest_names import is_near_miss
from veomni_hook.patches.idioms.recognise import recognise
from veomni_hook.patches.plan import Origin
from veomni_hook.patches.selection import selected
from veomni_hook.patches.site import Site, Status
from veomni_hook.patches.spec import Patch, PatchConfig, PatchType
from veomni_hook.patches.verbs.targets import members, method_names
from veomni_hook.tools.lock import LINE, Change, Lock, Override, compare, snapshot
from veomni_hook.tools.lock.changes import GONE
from veomni_hook.tools.lock.changes import RENAMED as ONLY_RENAMED
from veomni_hook.tools.migration.alone import near

__all__ = ["APPLIES", "GONE", "MOVED", "RENAMED", "Served", "served"]

APPLIES = "applies"
RENAMED = "applies, renamed"
MOVED = "moved"

_METHODS = (PatchType.METHOD_OVERRIDE, PatchType.METHOD_ADDITION)
_KINDS = {
    PatchType.CLASS_REPLACEMENT: ("class",),
    PatchType.INIT_MODIFICATION: ("class",),
    PatchType.FUNCTION_REPLACEMENT: ("function",),
    PatchType.METHOD_OVERRIDE: ("method",),
    PatchType.METHOD_ADDITION: ("method",),
}
_FUNCTIONS = ("function", "method")
_RELIED = "relies_on"
#: The module whose heads other modules inherit without a text of their own.
_INHERITED = "modeling_layers"


@dataclass(frozen=True)
class Served:
    """One patch of a config, judged against one release.

    Attributes:
        patch: the patch.
        status: `applies`, `applies, renamed` (it is given the new names of parameters), `moved` (upstream's
            code of the target is not what the patch was written for) or `gone` (the target does not exist).
        ops: what idioms route inside the target, as ``op/variant``, in the order of the source.
        detail: what moved, or the nearest names; otherwise a remark or empty.
        diff: upstream's code that the patch was written for against that of the release, as a unified diff;
            empty if they are the same, or if the former is not known.
    """

    patch: Patch
    status: str
    ops: tuple[str, ...]
    detail: str
    diff: str = ""


def served(
    config: PatchConfig,
    source: str,
    origin: Origin,
    *,
    base: str | None = None,
    base_version: str = "",
) -> list[Served]:
    """Judge every patch of a config against the source of its module in one release.

    Args:
        config: the config; one made with patchgen must be adopted.
        source: the module's text in that release.
        origin: where the text comes from. If its path is in an unpacked transformers package, the code that
            the module inherits from `transformers.modeling_layers` counts for ``ops`` too.
        base: the module's text in the release that the config was made for. Without it, nothing is `moved`.
        base_version: the version of that release, for the diffs.

    Returns:
        A result for each patch, in the order of the config. A config for a pattern of modules has one for
        every definition that a patch applies to in either text.

    Raises:
        ConfigError, PatchError: a patch has an unknown type or an invalid pattern.
        IdiomError: an idiom fails on the module.
        SyntaxError: one of the texts is not valid Python.
    """
    now = Document(source, origin.module)
    before = Document(base, origin.module) if base is not None else None
    patches = list(_patches(config, now, before))
    changes = _changes(config, patches, source, origin, base, base_version or "before")
    sites = [site for site in recognise(now) if site.status is Status.ROUTED]
    sites += _inherited(now, origin)
    return [_judged(config, patch, now, before, changes, sites) for patch in patches]


def _patches(config: PatchConfig, now: Document, before: Document | None) -> Iterator[Patch]:
    seen: set[tuple[object, str, str | None]] = set()
    for document in (before, now) if config.is_pattern else (now,):
        for patch, _ in selected(config, document) if document is not None else ():
            key = (patch.patch_type, patch.target, patch.description)
            if not config.is_pattern or key not in seen:
                seen.add(key)
                yield patch


def _judged(
    config: PatchConfig,
    patch: Patch,
    now: Document,
    before: Document | None,
    changes: dict[str, list[Change]],
    sites: Sequence[Site],
) -> Served:
    ops = tuple(dict.fromkeys(f"{site.op}/{site.variant}" for site in sites if _concerns(site, patch, now)))
    missing = _missing(config, patch, now, before, changes)
    if missing:
        return Served(patch, GONE, ops, missing)
    kinds = _KINDS.get(patch.patch_type, _FUNCTIONS)
    added = _find(now, patch.target, kinds) if before is not None else ()
    if added and before is not None and not _find(before, patch.target, kinds):
        detail = f"upstream defines {patch.target} itself, and did not where the patch was written"
        lines = "".join(f"+{line}\n" for line in now.text(added[-1].node).splitlines())
        return Served(patch, MOVED, ops, detail, f"--- nothing\n+++ {now.module}:{patch.target}\n{lines}")
    said = [c for c in changes.get(_overridden(patch), ()) if c.kind == patch.patch_type.value]
    said += [c for name in patch.relies_on for c in changes.get(name, ()) if c.kind == _RELIED]
    said = [change for change in said if change.result != LINE]
    diff = "".join(dict.fromkeys(change.diff for change in said))
    matters = any(change.matters for change in said)
    if matters or any(change.result == ONLY_RENAMED for change in said):
        detail = "; ".join(
            dict.fromkeys(change.detail.removesuffix(f"; {config.name} has to follow") for change in said)
        )
        return Served(patch, MOVED if matters else RENAMED, ops, detail, diff)
    return Served(patch, APPLIES, ops, said[0].detail if said else "", diff)


def _missing(
    config: PatchConfig,
    patch: Patch,
    now: Document,
    before: Document | None,
    changes: dict[str, list[Change]],
) -> str:
    """Why the target of a patch does not exist; empty if it does, or if the patch may add it."""
    kinds = _KINDS.get(patch.patch_type, _FUNCTIONS)
    if _find(now, patch.target, kinds):
        return ""
    owner = _owner(patch.target)
    holder = _class(now, owner) if patch.patch_type in _METHODS else None
    known = [d.qualname for d in now.definitions() if d.kind in kinds]
    if patch.patch_type in _METHODS and holder is None:
        classes = [d.qualname for d in now.definitions() if d.kind == "class"]
        return f"there is no class {owner}{near(owner, classes)}"
    if holder is not None and patch.patch_type is PatchType.METHOD_ADDITION:
        return ""
    if holder is not None and (before is None or not _find(before, patch.target, kinds)):
        method = patch.target.removeprefix(f"{owner}.")
        close = [name for name in method_names(holder) if is_near_miss(method, name)]
        if config.lenient and not close:
            return ""
        known = [f"{owner}.{name}" for name in close] or known
    renamed = next((c.detail for c in changes.get(_overridden(patch), ()) if c.result == GONE), "")
    renamed = renamed.partition(";")[0]
    if renamed.startswith("the same code"):
        return renamed
    return f"there is no {' or '.join(kinds)} {patch.target}{near(patch.target, known)}"


def _find(document: Document, target: str, kinds: Sequence[str]) -> list[Definition]:
    return [definition for definition in document.find(target) if definition.kind in kinds]


def _class(document: Document, name: str) -> ast.ClassDef | None:
    nodes = [
        definition.node for definition in document.find(name) if isinstance(definition.node, ast.ClassDef)
    ]
    return nodes[-1] if nodes else None


def _owner(target: str) -> str:
    owner, _, last = plain(target).rpartition(".")
    return owner.rpartition(".")[0] if last in ("setter", "deleter") else owner


def _overridden(patch: Patch) -> str:
    wraps = patch.patch_type is PatchType.INIT_MODIFICATION
    return f"{patch.target}.__init__" if wraps else patch.target


def _changes(
    config: PatchConfig,
    patches: Sequence[Patch],
    source: str,
    origin: Origin,
    base: str | None,
    base_version: str,
) -> dict[str, list[Change]]:
    """What changed between the two texts in the definitions that the patches replace or rely on."""
    if base is None:
        return {}
    names = {(_overridden(patch), patch.patch_type.value) for patch in patches}
    names |= {(name, _RELIED) for patch in patches for name in patch.relies_on}
    overrides = tuple(Override(*name, config.name) for name in sorted(names))
    old = snapshot(origin.module, base, overrides=overrides, idioms=False)
    known = {name: body.fingerprint for name, body in old.bodies.items()}
    new = snapshot(origin.module, source, overrides=overrides, known=known, idioms=False)
    by_target: dict[str, list[Change]] = {}
    locks = (
        Lock(version, "", (), {origin.module: held})
        for version, held in ((base_version, old), (origin.version, new))
    )
    for change in compare(*locks):
        by_target.setdefault(change.target, []).append(change)
    return by_target


def _concerns(site: Site, patch: Patch, now: Document) -> bool:
    """Whether a routed site lies in what the patch replaces."""
    target, patched = plain(site.target), plain(patch.target)
    if f"{target}.".startswith(f"{patched}."):
        return True
    # A head without code of its own: a patch that adds the method replaces what the class inherits.
    owner = _class(now, _owner(patch.target))
    if (
        owner is None
        or patch.patch_type not in _METHODS
        or target.rpartition(".")[2] != patched.rpartition(".")[2]
    ):
        return False
    if patched.rpartition(".")[2] in members(owner):
        return False
    return target.rpartition(".")[0] in [base.id for base in owner.bases if isinstance(base, ast.Name)]


def _inherited(now: Document, origin: Origin) -> list[Site]:
    """The routed sites of the shared module with heads that this one inherits, in the same package."""
    marker = os.sep.join(("", "models", ""))
    package, separator, _ = origin.path.rpartition(marker)
    path = os.path.join(package, f"{_INHERITED}.py")
    uses = any(
        isinstance(node, ast.ImportFrom) and (node.module or "").endswith(_INHERITED)
        for node in now.tree.body
    )
    if not separator or not uses or not os.path.isfile(path):
        return []
    with open(path, encoding="utf-8") as file:
        document = Document(file.read(), f"transformers.{_INHERITED}")
    return [site for site in recognise(document) if site.status is Status.ROUTED]
