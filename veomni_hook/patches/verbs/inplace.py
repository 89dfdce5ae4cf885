"""Code shared by guards and rewrites: both change one upstream function in place.

Both are written for known upstream code, so the function must exist exactly once and must have a known
fingerprint, and neither may change the names that the function uses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping

from veomni_hook.errors import PatchError, PatchTargetError
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Definition, Document, FunctionNode
from veomni_hook.patches.code.edit import Edit, apply_edits, marker_comment, statement_at
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.pattern import Capture, dedented
from veomni_hook.patches.code.renames import Rename, earlier_digests, renamed_parameters
from veomni_hook.patches.code.scope import parameter_names, used_names
from veomni_hook.patches.code.snippet import function_body
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.spec import Patch
from veomni_hook.patches.verbs.targets import resolve

__all__ = [
    "check_body",
    "check_relies_on",
    "earlier_names",
    "effects",
    "find_function",
    "mark_statement",
    "marker",
    "refuse_names",
    "with_new_names",
    "with_newlines",
]

_WORD = re.compile(r"\w+")


def find_function(document: Document, patch: Patch, where: str) -> tuple[Definition, FunctionNode]:
    """Return the one function or method that the patch's target names.

    Raises:
        PatchTargetError: there is none, or more than one.
    """
    definition = resolve(document, patch.target, ("function", "method"), where=where)
    if not isinstance(definition.node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise TypeError(f"{definition.qualname} is no function")
    return definition, definition.node


def check_body(document: Document, definition: Definition, patch: Patch, where: str) -> None:
    """Check that the patch was written for this function's code and for what it relies on.

    A patch without fingerprints accepts any function.

    Raises:
        PatchTargetError: a fingerprint is not among the patch's; the message shows it.
    """
    check_relies_on(document, patch.relies_on, where)
    digest = fingerprint(definition.node)
    if not patch.fingerprints or _is_known(document, definition, digest, patch.fingerprints):
        return
    line = document.lineno(document.start(definition.node))
    raise PatchTargetError(
        f"{patch.target} (line {line} of {document.module}) is not "
        f"the code that the patch was written for: its fingerprint is {digest}, known are "
        f"{listed(patch.fingerprints)}",
        where=where,
        fix=f"read the new body; if the patch still holds for it, add {digest!r} to fingerprints",
        target=patch.target,
    )


def _is_known(document: Document, definition: Definition, digest: str, known: Collection[str]) -> bool:
    """Whether a patch was written for a definition, or for it with earlier names of its parameters."""
    return digest in known or not {*known}.isdisjoint(earlier_digests(document, definition.node))


def earlier_names(document: Document, patch: Patch, function: FunctionNode) -> dict[str, Rename]:
    """The parameters that a patch calls by the names which they had before upstream renamed them."""
    renames = renamed_parameters(document)
    if not renames:
        return {}
    texts = (patch.before, patch.pattern, patch.replacement_text)
    used = {word for text in texts if text for word in _WORD.findall(text)}
    if callable(patch.replacement):
        used |= {*function_body(patch.replacement, where=document.module, target=patch.target)[0]}
    taken, known = parameter_names(function), used_names([function])
    return {old: rename for old, rename in renames.items() if old in used - known and rename.new in taken}


def with_new_names(text: str, names: Mapping[str, Rename], *, keywords: bool = False) -> str:
    """Code of a patch with the names that parameters have now; ``keywords``: those of calls, too."""
    if not names:
        return text
    try:
        document = Document(dedented(text))
    except SyntaxError:
        return text  # who reads it next says so
    edits = []
    for node in walk_ast(document.tree):
        of_call = node.arg if isinstance(node, ast.keyword) and keywords else None
        old = node.id if isinstance(node, ast.Name) else of_call
        if old is not None and old in names:
            start = document.start(node)
            edits.append(Edit(start, start + len(old), names[old].new))
    return apply_edits(document.source, edits)


def refuse_names(names: Iterable[str], what: str, *, fix: str, where: str, target: str) -> None:
    """Raise a `PatchError` that lists ``names`` after ``what``, if there are any."""
    listing = ", ".join(sorted(names))
    if listing:
        raise PatchError(f"{what}: {listing}", where=where, fix=fix, target=target)


def effects(capture: Capture, kinds: tuple[type[ast.AST], ...]) -> bool:
    """Whether the captured code contains a node of one of ``kinds``, which must not run twice."""
    return any(isinstance(node, kinds) for root in capture.nodes for node in walk_ast(root))


def marker(definition: Definition, patch: Patch, config: str) -> str:
    """The comment that names the patch in the patched text, without indentation and newline."""
    kind = "METHOD" if definition.kind == "method" else "FUNCTION"
    reason = patch.description or f"{patch.patch_type.value} of {patch.target}"
    return marker_comment(f"PATCHED {kind}", f"{patch.target}: {reason}" + (f" ({config})" if config else ""))


def mark_statement(document: Document, function: FunctionNode, offset: int, index: int, comment: str) -> Edit:
    """A comment line above the innermost statement that contains ``offset`` and begins its own line."""
    best = statement_at(document, function, offset)
    start = document.line_start(document.span(best)[0])
    return Edit(start, start, f"{document.indent(best)}{comment}{document.newline}", index, marker=True)


def with_newlines(document: Document, text: str) -> str:
    """``text``, whose lines end in ``\\n``, with the line endings of the document."""
    return document.newline.join(text.split("\n"))


def check_relies_on(document: Document, relies_on: Mapping[str, str | Collection[str]], where: str) -> None:
    """Check that the definitions which a patch relies on have known digests.

    Args:
        document: the module that the patch applies to.
        relies_on: qualified name of a definition in the module to the digests that it may have.
        where: the location for error messages.

    Raises:
        PatchTargetError: a definition is missing or has another digest.
    """
    for name, digests in relies_on.items():
        known = (digests,) if isinstance(digests, str) else tuple(digests)
        found = document.find(name)
        if not found:
            close = nearest(name, (definition.qualname for definition in document.definitions()))
            raise PatchTargetError(
                f"{name}, which the patch relies on, is not defined in {document.module}",
                where=where,
                fix=f"name a definition of that module in relies_on; nearest: {listed(close)}",
                target=name,
                nearest=close,
            )
        for definition in found:
            digest = fingerprint(definition.node)
            if not _is_known(document, definition, digest, known):
                line = document.lineno(document.start(definition.node))
                raise PatchTargetError(
                    f"{name} (line {line} of {document.module}) is not the code that the patch relies on: "
                    f"its fingerprint is {digest}, known are {listed(known)}",
                    where=where,
                    fix=f"read the new code; if the patch still holds, add {digest!r} to relies_on[{name!r}]",
                    target=name,
                )
