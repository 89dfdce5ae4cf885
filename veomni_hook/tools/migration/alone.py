"""Which patches of a config the engine refuses on one source: together first, and each alone after a failure.

What only works together with all patches (dropped imports, excluded names, helpers after a definition that
does not exist) is left out or stood in for, so that it does not hide what is wrong with a patch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from veomni_hook.errors import PatchError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.tree import module_statements
from veomni_hook.patches.engine import Origin, patch_source
from veomni_hook.patches.report import Remark
from veomni_hook.patches.spec import Patch, PatchConfig
from veomni_hook.patches.verbs.removals import importable
from veomni_hook.patches.verbs.targets import top_level

__all__ = ["Lost", "Refused", "helper_name", "imported_names", "lost_names", "near", "refused", "without"]


@dataclass(frozen=True)
class Lost:
    """What a config says about a name that a source does not have.

    Attributes:
        kind: `exclude`, `drop_import` or `helper` (to be placed after the name).
        name: the name.
        detail: the nearest names.
    """

    kind: str
    name: str
    detail: str


@dataclass
class Refused:
    """What the engine refuses.

    Attributes:
        patches: the error of each patch that does not apply on its own, by its index.
        together: the error of the config as a whole, if no patch alone causes it.
        remarks: what is wrong with a config made for patchgen that patchgen accepts.
    """

    patches: dict[int, PatchError] = field(default_factory=dict)
    together: PatchError | None = None
    remarks: tuple[Remark, ...] = ()


def lost_names(config: PatchConfig, document: Document) -> list[Lost]:
    """Return the excluded names, dropped imports and places of helpers that a source does not have.

    Imports that a patchgen config drops are not among them: dropping what is not there is right.
    """
    if config.is_pattern:
        return []
    imported = imported_names(document)
    defined = [d.qualname for d in document.definitions() if "." not in d.qualname]
    lost = [
        Lost("exclude", name, f"there is nothing {name} to leave out{near(name, defined)}")
        for name in dict.fromkeys(config.exclude)
        if not top_level(document, name)
    ]
    lost += [
        Lost(
            "helper",
            positioned.target,
            f"{helper_name(positioned.helper)} has no place{near(positioned.target, defined)}",
        )
        for positioned in config.positioned_helpers
        if not top_level(document, positioned.target)
    ]
    if not config.lenient:
        lost += [
            Lost("drop_import", name, f"{name} is not imported{near(name, imported)}")
            for name in sorted(config.drop_imported_names)
            if name not in imported
        ]
    return lost


def refused(config: PatchConfig, patches: Sequence[Patch], document: Document, origin: Origin) -> Refused:
    """Apply patches of a config to a source; return what does not apply, and why.

    Args:
        config: the config.
        patches: those of its patches whose targets exist, as `served` returns them.
        document: the source.
        origin: where it comes from.

    Raises:
        ConfigError: a patch has an unknown type.
    """
    whole = without(config, document, origin.module)
    refusals, first = Refused(), None
    left = dict(enumerate(patches))
    while True:
        whole.patches = list(left.values())
        result = _tried(whole, document, origin)
        if not isinstance(result, PatchError):
            refusals.remarks = result
            break
        first = first or result
        guilty = {
            index: error
            for index, patch in left.items()
            if patch.target == result.target and (error := _alone(whole, patch, document, origin)) is not None
        }
        refusals.patches |= guilty
        left = {index: patch for index, patch in left.items() if index not in guilty}
        if guilty:
            continue
        if not (whole.exclude or whole.drop_imported_names):
            return _one_by_one(whole, patches, document, origin)
        whole.exclude, whole.drop_imported_names = [], set()
    if not refusals.patches:
        refusals.together = first
    return refusals


def _alone(whole: PatchConfig, patch: Patch, document: Document, origin: Origin) -> PatchError | None:
    """The error of one patch without the others."""
    one = copy.copy(whole)
    one.patches, one.exclude, one.drop_imported_names = [patch], [], set()
    result = _tried(one, document, origin)
    return result if isinstance(result, PatchError) else None


def _one_by_one(whole: PatchConfig, patches: Sequence[Patch], document: Document, origin: Origin) -> Refused:
    """The same where no patch is to blame for the error: what all of them share fails, or two conflict."""
    whole.patches = []
    around = _tried(whole, document, origin)
    refusals = Refused()
    for index, patch in enumerate(patches):
        error = _alone(whole, patch, document, origin)
        if error is not None and not (isinstance(around, PatchError) and error.what == around.what):
            refusals.patches[index] = error
    if not refusals.patches:
        whole.patches = list(patches)
        together = _tried(whole, document, origin)
        refusals.together = next((e for e in (around, together) if isinstance(e, PatchError)), None)
    return refusals


def without(config: PatchConfig, document: Document, module: str) -> PatchConfig:
    """Return a copy of a config for a module, without what it says about names that the source lacks.

    A helper that has no place is stood in for by its name, so that the patches that use it can be tried.
    """
    lost = {(one.kind, one.name) for one in lost_names(config, document)}
    one = copy.copy(config)
    one.label, one.source_module = config.name, module
    one.exclude = [name for name in config.exclude if ("exclude", name) not in lost]
    one.drop_imported_names = config.drop_imported_names & imported_names(document)
    one.positioned_helpers = [h for h in config.positioned_helpers if ("helper", h.target) not in lost]
    placeless = [helper_name(h.helper) for h in config.positioned_helpers if ("helper", h.target) in lost]
    one.post_import_blocks = [*config.post_import_blocks, *(f"{name} = None" for name in placeless)]
    return one


def _tried(config: PatchConfig, document: Document, origin: Origin) -> PatchError | tuple[Remark, ...]:
    """Apply a config; return the error, or the remarks of what applies."""
    try:
        patched = patch_source(document.source, [config], origin, device=config.device or "gpu")
    except PatchError as error:
        return error
    return patched.report.remarks


def imported_names(document: Document) -> set[str]:
    """Return the names under which imports of a module can be dropped."""
    return {name for one in module_statements(document.tree) for name in importable(one)}


def helper_name(helper: object) -> str:
    """Return the name of a helper of a config."""
    return str(getattr(helper, "__name__", helper))


def near(name: str, known: Collection[str]) -> str:
    """Return the nearest names as the end of a message; empty if none is near."""
    close = nearest(name, known)
    return f"; nearest: {listed(close)}" if close else ""
