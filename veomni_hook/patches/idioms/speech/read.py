"""Which parts of a model make speech, and what is left of the model without them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import bound_names, parameter_names
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.code.tree import assigned, called_attributes, own_attribute, walk_ast
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed

__all__ = ["BUILT", "Speech", "has_forward", "mode_in", "read", "refusals", "speakers_file"]

#: The attribute that says whether a model has the parts.
BUILT = "has_talker"
DECISION = Template(f"self.{BUILT} = CONFIG.FIELD", names="CONFIG")
#: What ``__init__`` then asks, and does.
ASKED = (Template(f"self.{BUILT}"), Template("CONFIG.FIELD"))
BUILDER = Template("if TEST:\n    self.METHOD()")
#: Modules that a method makes.
MADE = [Template(f"{made}(*ARGUMENTS, **OPTIONS)", names="KIND") for made in ("KIND", "KIND._from_config")]
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
    made = {name: _made(view, value) for name, value in assigned(walk_ast(init))}
    rest = [(name, found) for name, found in made.items() if found]
    if made.keys() & {*parts}:
        raise Missed("__init__ builds these parts itself", init, Code.OTHER_FORM)
    if len(rest) != 1 or not has_forward(view, rest[0][1]):
        raise Missed("without them, it is not one module with a forward", init, Code.OTHER_FORM)
    return Speech(decision.first, config, decision["FIELD"], method, parts, rest[0])


def has_forward(view: ModuleView, name: str) -> bool:
    """Whether a class of the module defines or inherits ``forward``, from a class of the module."""
    return any(
        each is not None and "forward" in view.methods(each)
        for each in view.scope.ancestors(view.classes[name])
    )


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
    decisions = [found for statement in init.body if (found := DECISION.match(statement)) is not None]
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
    statements = [each for each in method.body if isinstance(each, ast.Assign) and _made(view, each.value)]
    parts = [own_attribute(target) for each in statements for target in each.targets]
    if not parts or not all(parts):
        raise Missed(f"{method.name} does not assign parts to attributes", method, Code.OTHER_FORM)
    return tuple(parts)


def _made(view: ModuleView, value: ast.expr) -> str:
    """The class of the module that a value is built from, ``C(…)`` or ``C._from_config(…)``; else empty."""
    made = next(filter(None, (form.match(value) for form in MADE)), None)
    return made["KIND"] if made and made["KIND"] in view.classes else ""
