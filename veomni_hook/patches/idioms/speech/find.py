"""Models with parts that make speech: the parts are left unbuilt, and the rest of the model can be trained.

A class is recognised by what its ``__init__`` decides (``self.has_talker = config.field``) and builds. Four
places change, each a site of its own, so that a config may replace one of them:

* ``__init__``: gets a configuration without speech;
* ``forward``: where the class has none, it is that of the rest, with the same arguments;
* ``generate``: where upstream reads a part, or raises because the parts are missing; and text is the default;
* ``save_pretrained``: where ``from_pretrained`` also reads a file, it is saved.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit, marker_comment
from veomni_hook.patches.code.tree import initialised, own_attribute, walk_ast
from veomni_hook.patches.idioms.speech.read import (
    BUILT,
    Speech,
    has_forward,
    mode_in,
    read,
    refusals,
    speakers_file,
)
from veomni_hook.patches.routes.guards import before_body, before_statement, in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed, Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "speech"
CANDIDATES = "every class whose __init__ assigns has_talker, or that defines enable_talker"

_VARIANT = "left_out"
_IMPORT = ("veomni_hook.multimodal", "speech as veomni_speech")
_COMMENT = "without speech"


def find(view: ModuleView) -> Iterator[Site]:
    """Every class of a module whose instances may have parts that make speech."""
    for owner in view.classes.values():
        methods = view.methods(owner)
        if "enable_talker" not in methods and BUILT not in dict(initialised(owner)):
            continue
        site = partial(Site, OP, f"{owner.name}.__init__", lineno=owner.lineno, imports=(_IMPORT,))
        try:
            speech = read(view, owner)
            edits = _without_parts(view, methods["__init__"], speech)
        except Missed as missed:
            init = methods.get("__init__")
            code = f"veomni_speech.kept(type(self), {json.dumps(str(missed))})"
            told = before_body(view, init, code, _COMMENT) if init is not None else ()
            status = Status.REFUSED if told else Status.MISSED
            yield site(status, reason=missed.reason, edits=told)
            continue
        captures = {"field": speech.field, "parts": ", ".join(speech.parts)}
        yield site(Status.ROUTED, _VARIANT, captures=captures, edits=edits)
        yield from _others(view, owner, speech)


def _others(view: ModuleView, owner: ast.ClassDef, speech: Speech) -> Iterator[Site]:
    """The sites in other methods."""
    site = partial(Site, OP, status=Status.ROUTED, variant=_VARIANT, counted=False, lineno=owner.lineno)
    name, made = speech.rest
    if not has_forward(view, owner.name):
        code = (
            f"@veomni_speech.taking_what({made}.forward)\n"
            "def forward(self, *args, **kwargs):\n"
            f"    return self.{name}(*args, **kwargs)"
        )
        yield site(target=f"{owner.name}.forward", edits=_method(view, owner, code), imports=(_IMPORT,))
    for method in view.methods(owner).values():
        edits = [edit for statement in refusals(method) for edit in _refused(view, method, statement)]
        if edits:
            target = f"{owner.name}.{method.name}"
            if (options := mode_in(method)) is not None:
                code = f"veomni_speech.text_by_default(self, {options})"
                edits += before_body(view, method, code, _COMMENT)
            yield site(target=target, edits=tuple(edits), imports=(_IMPORT,))
            if read_early := tuple(_read_early(view, method, speech)):
                yield site(target=target, edits=read_early)
    if found := speakers_file(view, owner):
        file, attribute = found
        code = (
            "def save_pretrained(self, save_directory, *args, **kwargs):\n"
            "    super().save_pretrained(save_directory, *args, **kwargs)\n"
            f"    veomni_speech.save_speakers(self.{attribute}, save_directory, {json.dumps(file)}, "
            "args, kwargs)"
        )
        target = f"{owner.name}.save_pretrained"
        yield site(target=target, edits=_method(view, owner, code), imports=(_IMPORT,))


def _without_parts(view: ModuleView, init: FunctionNode, speech: Speech) -> tuple[Edit, ...]:
    receiver = init.args.args[0].arg
    parts = ", ".join(map(json.dumps, speech.parts))
    given = f"{receiver}, {speech.config}, {json.dumps(speech.field)}, {receiver}.{speech.builder}, {parts}"
    code = f"{speech.config} = {receiver}.config = veomni_speech.left_out({given})"
    return before_statement(view, init, speech.decision, code, f"{OP}/{_VARIANT}")


def _refused(view: ModuleView, method: FunctionNode, statement: ast.stmt) -> tuple[Edit, ...]:
    return before_statement(view, method, statement, "veomni_speech.refuse(type(self))", _COMMENT)


def _read_early(view: ModuleView, method: FunctionNode, speech: Speech) -> Iterator[Edit]:
    """What a method reads from a part before it returns for want of it: None without the part."""
    for statement in method.body:
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return):
            return
        for node in walk_ast(statement):
            if isinstance(node, ast.Attribute) and own_attribute(node.value) in speech.parts:
                yield in_place(view, node, f"({view.text(node)} if self.{BUILT} else None)")


def _method(view: ModuleView, owner: ast.ClassDef, code: str) -> tuple[Edit, ...]:
    """Add a method at the end of a class."""
    document, last = view.document, owner.body[-1]
    indent = document.indent(last)
    at = document.next_line(document.end(last))
    text = "".join(f"{indent}{line}\n" for line in code.splitlines())
    return (
        Edit(at, at, "\n"),
        Edit(at, at, f"{indent}{marker_comment('ROUTED', f'{OP}/{_VARIANT}')}\n", marker=True),
        Edit(at, at, text),
    )
