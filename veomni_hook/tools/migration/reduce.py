"""Which patches of a config are still needed in one release, and the config that holds only those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from veomni_hook.errors import NameMapError, SignatureError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.snippet import read_snippet
from veomni_hook.patches.plan import Origin
from veomni_hook.patches.spec import Patch, PatchConfig, PatchType
from veomni_hook.tools.migration.alone import refused
from veomni_hook.tools.migration.judge import GONE, MOVED, UNNECESSARY, Judgement
from veomni_hook.tools.migration.needs import Needs, needs

__all__ = ["COVERED", "KEPT", "LEFT_OUT", "Explained", "Reduced", "own", "reduce"]

#: This package, or upstream itself, serves everything that the patch is for.
COVERED = "covered"
#: The patch is in the reduced config.
KEPT = "kept"
#: The patch is needed, but does not apply to the release; a person has to write it anew.
LEFT_OUT = "left out"


@dataclass(frozen=True)
class Explained:
    """What becomes of a patch.

    Attributes:
        judgement: the patch and its verdict.
        outcome: `covered`, `kept` or `left out`.
        reason: by what it is covered, what is missing here, or why it cannot be kept and where it may go.
    """

    judgement: Judgement
    outcome: str
    reason: str


@dataclass(frozen=True)
class Reduced:
    """The reduced form of a config.

    Attributes:
        config: the original.
        explained: every patch, in the order of the original.
        patches: the kept ones, in the form that an own config needs.
        needs: what else of the original they need.
    """

    config: PatchConfig
    explained: Sequence[Explained]
    patches: Sequence[Patch]
    needs: Needs


def reduce(config: PatchConfig, judgements: Sequence[Judgement], source: str, origin: Origin) -> Reduced:
    """Reduce a config to what a release still needs of it.

    What an own config would refuse, and patchgen accepts, is declared where the language can: an override
    that adds becomes an addition, a changed signature is allowed, and entries of a name map that match
    nothing are left out.

    Args:
        config: the config.
        judgements: those of the config for this release.
        source: the module's text.
        origin: where the text comes from.

    Raises:
        ReplacementError: the source of a patch or a helper cannot be read.
        SyntaxError: a block of the config is not valid Python.
    """
    document = Document(source, origin.module)
    wanted = {
        index: own(one.patch, document)
        for index, one in enumerate(judgements)
        if one.patch is not None and one.verdict not in (UNNECESSARY, GONE)
    }
    problems: dict[int, str] = {}
    for _ in range(2):  # once more with the signatures that were refused allowed
        remaining = _config(config, list(wanted.values()), document)
        refusals = refused(remaining, remaining.patches, document, origin)
        for at, error in refusals.patches.items():
            index = list(wanted)[at]
            if isinstance(error, SignatureError) and not wanted[index].allow_signature_change:
                wanted[index] = replace(wanted[index], allow_signature_change=True)
            else:
                problems[index] = error.what
        wanted = {index: patch for index, patch in wanted.items() if index not in problems}
    explained = [
        _explained(one, problems.get(index, ""))
        for index, one in enumerate(judgements)
        if one.patch is not None
    ]
    patches = list(wanted.values())
    return Reduced(config, explained, patches, needs(config, patches, document))


def own(patch: Patch, document: Document) -> Patch:
    """The patch as an own config declares it."""
    kind = patch.patch_type
    there = any(definition.kind == "method" for definition in document.find(patch.target))
    if kind is PatchType.METHOD_OVERRIDE and not there:
        kind = PatchType.METHOD_ADDITION
    return replace(patch, patch_type=kind, name_map=_matching(patch))


def _matching(patch: Patch) -> dict[str, str] | None:
    """The entries of a name map that match something in the replacement."""
    if not patch.name_map or patch.replacement is None:
        return None
    matching = {}
    for key, name in patch.name_map.items():
        try:
            read_snippet(patch.replacement, where="", name_map={key: name})
        except NameMapError:
            continue
        matching[key] = name
    return matching or None


def _config(config: PatchConfig, patches: list[Patch], document: Document) -> PatchConfig:
    """An own config, with what the patches need of the original."""
    needed = needs(config, patches, document)
    return PatchConfig(
        config.source_module,
        patches=patches,
        additional_imports=needed.imports,
        post_import_blocks=needed.blocks,
        helpers=needed.helpers,
        positioned_helpers=needed.placed,
        drop_imported_names=set(needed.drops),
        exclude=needed.excluded,
        device=config.device,
        label=config.name,
    )


def _explained(one: Judgement, problem: str) -> Explained:
    covers = one.coverage
    if one.verdict == UNNECESSARY and covers is not None:
        served = ", ".join(concern.name for concern in covers.concerns)
        return Explained(one, COVERED, f"{served}: {covers.by}")
    if one.verdict == GONE or covers is None:
        return Explained(one, LEFT_OUT, one.detail)
    reason = f"missing: {'; '.join(covers.left)}"
    if one.verdict == MOVED:
        reason += f". Upstream has changed: {one.detail}"
    if problem:
        return Explained(one, LEFT_OUT, f"{problem}. {reason}")
    return Explained(one, KEPT, reason)
