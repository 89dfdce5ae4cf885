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
from dataclasses import dataclass, replace
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit, marker_comment
from veomni_hook.patches.code.scope import bound_names, parameter_names
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.code.tree import assigned, called_attributes, initialised, own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.modules import method_of
from veomni_hook.patches.interpreter.walk import receiver_name
from veomni_hook.patches.routes.guards import before_body, before_statement, in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status

__all__ = [
    "BUILT",
    "CANDIDATES",
    "OP",
    "SETTING",
    "WORDS",
    "Speech",
    "find",
    "mode_in",
    "read",
    "refusals",
    "speakers_file",
]

OP = "speech"
WORDS = ""
SETTING = "speech"
CANDIDATES = "every class whose __init__ assigns has_talker, or that defines enable_talker"

#: The attribute that says whether a model has the parts.
BUILT = "has_talker"
DECISION = Template(f"self.{BUILT} = CONFIG.FIELD", names="CONFIG")
#: What ``__init__`` then asks, and does.
ASKED = (Template(f"self.{BUILT}"), Template("CONFIG.FIELD"))
BUILDER = Template("if TEST:\n    self.METHOD()")
#: Modules that a method makes.
MADE = [Template(f"{maker}(*ARGUMENTS, **OPTIONS)", names="KIND") for maker in ("KIND", "KIND._from_config")]
ABSENT = Template(f"not self.{BUILT}")
MODE = Template("KWARGS.pop('generation_mode', *DEFAULT)", names="KWARGS")
#: A file that is read beside the weights, and the attribute that it fills.
FILE = Template("cached_file(FOLDER, NAME, *ARGUMENTS, **OPTIONS)")
FILLED = Template(
    """
for KEY, VALUE in torch.load(*FILE, **OPTIONS).items():
    self.ATTRIBUTE[KEY] = VALUE
"""
)


@dataclass(frozen=True)
class Speech:
    """What ``__init__`` builds, depending on a field of the configuration.

    Attributes:
        decision: the statement that stores the field: ``self.has_talker = config.field``.
        config: the parameter of ``__init__`` that is the configuration.
        field: the field.
        builder: the method that builds the parts.
        parts: the attributes that hold the parts.
        rest: the attribute of the model that is always built, and its class.
    """

    decision: ast.stmt
    config: str
    field: str
    builder: str
    parts: tuple[str, ...]
    rest: tuple[str, str]


def read(view: ModuleView, owner: ast.ClassDef) -> Speech:
    """Read a class whose instances may have parts that make speech.

    Raises:
        Missed: the class decides or builds in another way.
    """
    methods = view.methods(owner)
    init = methods.get("__init__")
    if init is None:
        raise Missed("it has no __init__ of its own", owner, Code.OTHER_FORM)
    decision = _decision(init)
    config = decision["CONFIG"]
    if config in bound_names(init.body):
        raise Missed(f"__init__ binds {config} again", init, Code.OTHER_FORM)
    method = _builder(init, decision)
    if method not in methods:
        raise Missed(f"{method} is not one of its methods", init, Code.OTHER_FILE)
    parts = _parts(view, methods[method])
    kinds = {name: _made(view, value) for name, value in assigned(walk_ast(init))}
    rest = [(name, kind) for name, kind in kinds.items() if kind]
    if kinds.keys() & {*parts}:
        raise Missed("__init__ builds these parts itself", init, Code.OTHER_FORM)
    if len(rest) != 1 or method_of(view, rest[0][1], "forward") is None:
        raise Missed("without them, it is not one module with a forward", init, Code.OTHER_FORM)
    return Speech(decision.first, config, decision["FIELD"], method, parts, rest[0])


def refusals(method: FunctionNode) -> Iterator[ast.stmt]:
    """The statements that raise because the parts are missing: ``if … not self.has_talker: raise …``."""
    for node in walk_ast(method):
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            if any(map(ABSENT.match, walk_ast(node.test))):
                yield node.body[0]


def mode_in(method: FunctionNode) -> str | None:
    """The name of ``**kwargs``, if a method takes from it whether text or speech is asked for; else None."""
    name = method.args.kwarg.arg if method.args.kwarg is not None else ""
    return name if name and any(MODE.match(node, KWARGS=name) for node in walk_ast(method)) else None


def speakers_file(view: ModuleView, owner: ast.ClassDef) -> tuple[str, str] | None:
    """The file that ``from_pretrained`` also reads, and the attribute that a method then fills; else None."""
    methods = view.methods(owner)
    loading = methods.get("from_pretrained")
    if loading is None or "save_pretrained" in methods:
        return None
    names = [file.expression("NAME") for file in filter(None, map(FILE.match, walk_ast(loading)))]
    files = [name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)]
    called = called_attributes(loading) & methods.keys()
    loops = (FILLED.match(statement) for name in called for statement in methods[name].body)
    filled = {loop["ATTRIBUTE"] for loop in loops if loop is not None}
    return (files[0], filled.pop()) if len(files) == len(filled) == 1 else None


def _decision(init: FunctionNode) -> Found:
    decisions = [match for statement in init.body if (match := DECISION.match(statement)) is not None]
    if len(decisions) != 1:
        raise Missed(f"__init__ does not set {BUILT} to a field of its configuration", init, Code.OTHER_FORM)
    config = decisions[0]["CONFIG"]
    if config not in parameter_names(init):
        raise Missed(f"{config} is not a parameter of __init__", init, Code.OTHER_FORM)
    return decisions[0]


def _builder(init: FunctionNode, decision: Found) -> str:
    """The method that builds the parts."""
    names = {hole: decision[hole] for hole in ("CONFIG", "FIELD")}
    for statement in init.body[init.body.index(decision.first) + 1 :]:
        if isinstance(statement, ast.If) and any(
            asked.match(statement.test, None, **names) for asked in ASKED
        ):
            if (built := BUILDER.match(statement)) is None:
                raise Missed("what depends on it is not one call of a method", statement, Code.OTHER_FORM)
            return built["METHOD"]
    raise Missed(f"nothing depends on {BUILT}", init, Code.OTHER_FORM)


def _parts(view: ModuleView, method: FunctionNode) -> tuple[str, ...]:
    statements = [
        statement
        for statement in method.body
        if isinstance(statement, ast.Assign) and _made(view, statement.value)
    ]
    parts = [own_attribute(target) for statement in statements for target in statement.targets]
    if not parts or not all(parts):
        raise Missed(f"{method.name} does not assign parts to attributes", method, Code.OTHER_FORM)
    return tuple(parts)


def _made(view: ModuleView, value: ast.expr) -> str:
    """The class of the module that a value is built from, ``C(…)`` or ``C._from_config(…)``; else empty."""
    match = next(filter(None, (form.match(value) for form in MADE)), None)
    return match["KIND"] if match and match["KIND"] in view.classes else ""


_VARIANT = "left_out"
_IMPORT = ("veomni_hook.multimodal", "speech as veomni_speech")
_COMMENT = "without speech"
_REFUSE = "veomni_speech.refuse(type(self))"


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
    site = partial(Site.calling, OP, variant=_VARIANT, line=owner, used=_IMPORT, counted=False)
    name, kind = speech.rest
    if method_of(view, owner.name, "forward") is None:
        code = (
            f"@veomni_speech.taking_what({kind}.forward)\n"
            "def forward(self, *args, **kwargs):\n"
            f"    return self.{name}(*args, **kwargs)"
        )
        yield site(target=f"{owner.name}.forward", edits=_method(view, owner, code))
    for method in view.methods(owner).values():
        edits = [
            edit
            for statement in refusals(method)
            for edit in before_statement(view, method, statement, _REFUSE, _COMMENT)
        ]
        if edits:
            target = f"{owner.name}.{method.name}"
            if (options := mode_in(method)) is not None:
                code = f"veomni_speech.text_by_default(self, {options})"
                edits += before_body(view, method, code, _COMMENT)
            yield site(target=target, edits=edits)
            if read_early := tuple(_read_early(view, method, speech)):
                yield replace(site(target=target, edits=read_early), imports=())
    if speakers := speakers_file(view, owner):
        file, attribute = speakers
        code = (
            "def save_pretrained(self, save_directory, *args, **kwargs):\n"
            "    super().save_pretrained(save_directory, *args, **kwargs)\n"
            f"    veomni_speech.save_speakers(self.{attribute}, save_directory, {json.dumps(file)}, "
            "args, kwargs)"
        )
        target = f"{owner.name}.save_pretrained"
        yield site(target=target, edits=_method(view, owner, code))


def _without_parts(view: ModuleView, init: FunctionNode, speech: Speech) -> tuple[Edit, ...]:
    receiver = receiver_name(init)
    parts = ", ".join(map(json.dumps, speech.parts))
    arguments = (
        f"{receiver}, {speech.config}, {json.dumps(speech.field)}, {receiver}.{speech.builder}, {parts}"
    )
    code = f"{speech.config} = {receiver}.config = veomni_speech.left_out({arguments})"
    return before_statement(view, init, speech.decision, code, f"{OP}/{_VARIANT}")


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
