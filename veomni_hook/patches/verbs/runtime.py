"""What the code of a config asks of the runtime that it was written for, asked of this package instead.

VeOmni's trainer installs a loss that returns several values, and binds a kernel or eager code to each slot.
Code that is served without that trainer would unpack transformers' loss, which is one value, and would find
slots that nobody bound. `veomni_hook.integrations.veomni.unbound` answers there; what VeOmni has installed
or bound, it returns as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from types import CodeType

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, apply_edits
from veomni_hook.patches.code.snippet import read_snippet
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.spec import ImportSpec

__all__ = ["IMPORT", "asks", "served"]

#: What code that is served imports.
IMPORT = ImportSpec("veomni_hook.integrations.veomni", ["unbound as veomni_unbound"])
_LOSS = Template("self.loss_function(*ARGUMENTS, **OPTIONS)")
#: Questions to a slot of VeOmni (``OpSlot``), and what asks this package the same.
_OF_SLOTS = (
    (Template("SLOT.use_eager_impl", names="SLOT"), "veomni_unbound.is_eager({})"),
    (Template("SLOT.bound_kernel()", names="SLOT"), "veomni_unbound.kernel_of({})"),
)
#: Code without any of these names asks nothing.
_NAMES = frozenset({"loss_function", "use_eager_impl", "bound_kernel"})


def served(document: Document) -> str:
    """Return the text of a document whose questions go to this package."""
    if not any(name in document.source for name in _NAMES):
        return document.source
    return apply_edits(document.source, list(_edits(document)))


def asks(replacements: Iterable[object], where: str) -> bool:
    """Return whether one of some functions and classes has a question, for which it needs `IMPORT`.

    Raises:
        ReplacementError: its source cannot be read; ``where`` is what declares it.
    """
    for replacement in replacements:
        parts = vars(replacement).values() if isinstance(replacement, type) else (replacement,)
        codes = (getattr(part, "__code__", None) for part in parts)
        names = {name for code in codes if isinstance(code, CodeType) for name in code.co_names}
        if names & _NAMES and any(_edits(read_snippet(replacement, where=where).document)):
            return True
    return False


def _edits(document: Document) -> Iterator[Edit]:
    for node in walk_ast(document.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if isinstance(node.value, ast.Call) and _LOSS.match(node.value) is not None:
                count = len(node.targets[0].elts)
                function = node.value.func
                yield Edit(
                    document.start(function), document.end(function), f"veomni_unbound.loss_of(self, {count})"
                )
        for template, text in _OF_SLOTS:
            if (asked := template.match(node)) is not None:
                yield Edit(document.start(node), document.end(node), text.format(asked["SLOT"]))
