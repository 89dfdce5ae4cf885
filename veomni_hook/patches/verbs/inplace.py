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
from veomni_hook.patches.code.edit import Edit, apply_edits, statement_at
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.pattern import Capture, dedented
from veomni_hook.patches.code.renames import Rename, earlier_digests, renamed_parameters
from veomni_hook.patches.code.scope import parameter_names, used_names
from veomni_hook.patches.code.snippet import function_body
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.plan import Task
from veomni_hook.patches.verbs.signature import remark_rename

__all__ = [
    "check_body",
    "earlier_names",
    "effects",
    "mark_statement",
    "marker",
    "refuse_names",
    "with_new_names",
]

_WORD = re.compile(r"\w+")


def check_body(task: Task, definition: Definition) -> None:
    """Check that a patch was written for this function's code and for what it relies on.

    A patch without fingerprints accepts any function.

    Raises:
        PatchTargetError: a fingerprint is not among the patch's, and the message shows it, or a definition
            that the patch relies on is missing.
    """
    document, patch = task.document, task.patch
    for name, digests in patch.relies_on.items():
        definitions = document.find(name)
        if not definitions:
            raise task.missing(
                f"{name}, which the patch relies on, is not defined in {document.module}",
                "name a definition of that module in relies_on; nearest",
                name,
                (definition.qualname for definition in document.definitions()),
                target=name,
            )
        for relied_on in definitions:
            fix = "read the new code; if the patch still holds, add {!r} to relies_on[{!r}]"
            _check_digest(task, relied_on, digests, name, "the patch relies on", fix)
    if patch.fingerprints:
        fix = "read the new body; if the patch still holds for it, add {!r} to fingerprints"
        _check_digest(task, definition, patch.fingerprints, patch.target, "the patch was written for", fix)


def _check_digest(
    task: Task, definition: Definition, known: Collection[str], name: str, role: str, fix: str
) -> None:
    """Raise unless a patch knows a definition, or it with earlier names of its parameters."""
    document, digest = task.document, fingerprint(definition.node)
    if digest in known or not {*known}.isdisjoint(earlier_digests(document, definition.node)):
        return
    line = document.lineno(document.start(definition.node))
    raise task.error(
        PatchTargetError,
        f"{name} (line {line} of {document.module}) is not the code that {role}: "
        f"its fingerprint is {digest}, known are {listed(known)}",
        fix.format(digest, name),
        target=name,
    )


def earlier_names(task: Task, function: FunctionNode) -> dict[str, Rename]:
    """The parameters that a patch calls by the names which they had before upstream renamed them.

    The plan gets a harmless remark on each.
    """
    renames, patch = renamed_parameters(task.document), task.patch
    if not renames:
        return {}
    texts = (patch.before, patch.pattern, patch.replacement_text)
    used = {word for text in texts if text for word in _WORD.findall(text)}
    if callable(patch.replacement):
        used |= {*function_body(patch.replacement, **task.place)[0]}
    taken, known = parameter_names(function), used_names([function])
    earlier = {old: rename for old, rename in renames.items() if old in used - known and rename.new in taken}
    for old, rename in earlier.items():
        remark_rename(task, old, rename)
    return earlier


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


def refuse_names(task: Task, names: Iterable[str], what: str, fix: str) -> None:
    """Raise a `PatchError` that lists ``names`` after ``what``, if there are any."""
    listing = ", ".join(sorted(names))
    if listing:
        raise task.error(PatchError, f"{what}: {listing}", fix)


def effects(capture: Capture, kinds: tuple[type[ast.AST], ...]) -> bool:
    """Whether the captured code contains a node of one of ``kinds``, which must not run twice."""
    return any(isinstance(node, kinds) for root in capture.nodes for node in walk_ast(root))


def marker(task: Task, definition: Definition) -> str:
    """The comment that names the patch in the patched text, without indentation and newline."""
    kind = "METHOD" if definition.kind == "method" else "FUNCTION"
    reason = "" if task.step.reason else f": {task.step.kind} of {task.target}"
    return task.marker(f"PATCHED {kind}", f"{task.target}{reason}")


def mark_statement(document: Document, function: FunctionNode, offset: int, comment: str) -> Edit:
    """A comment line above the innermost statement that contains ``offset`` and begins its own line."""
    best = statement_at(document, function, offset)
    start = document.line_start(document.span(best)[0])
    return Edit(start, start, f"{document.indent(best)}{comment}\n", marker=True)
