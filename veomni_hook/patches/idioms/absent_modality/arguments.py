"""The arguments of a call of a tower: which hold data, and of which form the data is."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import read_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import (
    calls_in,
    compared_with_none,
    contains,
    in_text_order,
    own_attribute,
    walk_ast,
)
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed
from veomni_hook.patches.upstream_names import names

__all__ = ["DATA", "Arguments", "attributes", "in_order", "read_arguments"]

#: Arguments that say how features are computed, and hold no data.
_OPTIONS = names("options of towers")
#: The forms of data: the names of arguments, in the order of the call.
PATCHES, IMAGES, GROUPS, SPECTRA = "patches_by_grid", "images", "images_in_groups", "spectra"
SIZED, PLACED, SHAPED = "images_with_sizes", "patches_with_positions", "patches_by_shape"
_PIXELS, _GRIDS, _MERGES = names("images"), names("grids"), names("merge sizes")
_POSITIONS, _FRAMES = names("positions of patches"), names("frames of videos")
_SIZES, _MASK = names("sizes of images"), names("mask of pixels")
_SHAPES = (*names("shapes of images"), *_MASK)
_FEATURES, _MASKS = names("spectra"), names("lengths of spectra")
#: How methods show which dimensions pixels have.
FLAT = Template("PATCHES, WIDTH = PIXELS.shape")
GROUPED = (Template("PIXELS.flatten(0, 1)"), Template("BATCH, GROUP, CHANNELS, HEIGHT, WIDTH = PIXELS.shape"))
#: Every name of an argument that holds data.
DATA = frozenset((*_PIXELS, *_GRIDS, *_MERGES, *_POSITIONS, *_FRAMES, *_SIZES, *_SHAPES, *_FEATURES, *_MASKS))


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call gives to the method.

    Attributes:
        form: the form of the data.
        data: the names of the method's arguments that hold data, in the order of the call, each with the
            name that the call gives.
        text: the call, with these names, and without ``**kwargs``.
        layout: ``groups`` if images come in groups, ``flat`` if the tower takes patches as vectors, which it
            arranges itself; else empty.
    """

    form: str
    data: dict[str, str]
    text: str
    layout: str = ""


def read_arguments(view: ModuleView, owner: ast.ClassDef, call: ast.Call) -> Arguments:
    """Read the arguments of a call.

    Raises:
        Missed: what an argument is for a batch without data is not known.
    """
    name = own_attribute(call.func)
    method = view.inherited_methods(owner).get(name)
    if method is None:
        raise Missed(f"{name} is not a method of a class of the file", call)
    parameters = [each.arg for each in method.args.args[1:]]
    if len(call.args) > len(parameters) or any(isinstance(each, ast.Starred) for each in call.args):
        raise Missed("its arguments are not those of the method", call)
    optional = {*_optional(view, owner, name, method), *_unused(method)}
    data: dict[str, str] = {}
    texts: list[str] = []
    for argument, value, named in [
        *((each, value, False) for each, value in zip(parameters, call.args, strict=False)),
        *((each.arg, each.value, True) for each in call.keywords if each.arg is not None),
    ]:
        text = ast.unparse(value)
        if argument in _OPTIONS:
            pass
        elif argument in optional:
            text = "None"
        elif argument not in DATA:
            raise Missed(f"what its argument {argument} is without data is not known", value)
        else:
            data[argument], text = _given(argument, value)
        texts.append(f"{argument}={text}" if named else text)
    form = _form(tuple(data), call)
    if form == PATCHES and not _merges(view, owner, name):
        raise Missed("it does not say how many patches become one feature", call)
    layout = "flat" if form == PATCHES and _is_flat(view) else ""
    if form == IMAGES and _groups(method):
        form, layout = GROUPS, "groups"
    return Arguments(form, data, f"self.{name}({', '.join(texts)})", layout)


def attributes(view: ModuleView, owner: ast.ClassDef, name: str) -> Iterator[str]:
    """The attributes of ``self``, other than methods, that a method uses, with the methods that it calls."""
    used = [each for method in _followed(view, owner, name) for each in map(own_attribute, in_order(method))]
    others = {"", "config", *view.inherited_methods(owner)}
    yield from (found for found in dict.fromkeys(used) if found not in others)


def _given(argument: str, value: ast.expr) -> tuple[str, str]:
    """The name of the data, and the text for it: the name itself, converted, or a mask turned round."""
    match value:
        case ast.Name(id=name):
            return name, name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="to")):
            return name, ast.unparse(value)
        case ast.UnaryOp(op=ast.Invert(), operand=ast.Name(id=name)) if argument in _MASKS:
            return name, f"{name}.logical_not()"
    raise Missed(f"its argument {argument} is computed from data", value)


def _optional(view: ModuleView, owner: ast.ClassDef, name: str, method: FunctionNode) -> Iterator[str]:
    """The arguments that may be None: that is their default, and the method asks whether they are.

    What the data itself consists of is none of these, nor data that makes the method call a tower once more.
    """
    positional = method.args.args
    defaults = positional[len(positional) - len(method.args.defaults) :]
    may_be = {
        each.arg
        for each, default in zip(defaults, method.args.defaults, strict=True)
        if isinstance(default, ast.Constant) and default.value is None
    }
    for argument in sorted(may_be - DATA.difference(_MASK)):
        asked = [
            node
            for each in _followed(view, owner, name)
            for node in walk_ast(each)
            if isinstance(node, ast.If | ast.IfExp) and _asks(node.test, argument)
        ]
        if asked and not any(_refuses(node) or _calls_a_tower(node) for node in asked):
            yield argument


def _unused(method: FunctionNode) -> set[str]:
    """The arguments that a method does not read."""
    return {each.arg for each in method.args.args} - read_names(method)


def _asks(test: ast.expr, name: str) -> bool:
    asked = compared_with_none(test, ast.Is, ast.IsNot)
    return isinstance(asked, ast.Name) and asked.id == name


def _refuses(node: ast.If | ast.IfExp) -> bool:
    return any(isinstance(each, ast.Raise) for each in walk_ast(node))


def _calls_a_tower(node: ast.If | ast.IfExp) -> bool:
    return any(own_attribute(call.func) for call in calls_in(node))


def _form(data: tuple[str, ...], call: ast.Call) -> str:
    """The form of the data, by the names of its arguments."""
    first, rest = data[:1], frozenset(data[1:])
    forms: Iterable[tuple[str, bool]] = (
        (IMAGES, not rest),
        (PATCHES, len(rest & {*_GRIDS}) == 1 and rest <= {*_GRIDS, *_MERGES}),
        (PLACED, len(rest & {*_POSITIONS}) == 1 and rest <= {*_POSITIONS, *_FRAMES}),
        (SIZED, rest == {*_SIZES}),
        (SHAPED, rest == {*_SHAPES}),
    )
    if first and first[0] in _PIXELS:
        for form, fits in forms:
            if fits:
                return form
    if first and first[0] in _FEATURES and rest <= {*_MASKS}:
        return SPECTRA
    raise Missed(f"the form of its data is not known: {', '.join(data)}", call)


def _is_flat(view: ModuleView) -> bool:
    """Whether a forward takes pixels for two dimensions."""
    return any(_of_pixels(FLAT, forward) for _, forward in view.forwards())


def _groups(method: FunctionNode) -> bool:
    """Whether a method merges or counts the first of five dimensions."""
    return any(_of_pixels(form, method) for form in GROUPED)


def _of_pixels(form: Template, method: FunctionNode) -> bool:
    return any(form.match(node, PIXELS=name) for node in walk_ast(method) for name in _PIXELS)


def _merges(view: ModuleView, owner: ast.ClassDef, name: str) -> bool:
    """Whether a method divides the number of patches (``grid.prod(-1) // merge**2``), or does not use it."""
    nodes = [node for method in _followed(view, owner, name) for node in walk_ast(method)]
    products = [each for each in nodes if isinstance(each, ast.Attribute) and each.attr == "prod"]
    divisions = [each for each in nodes if isinstance(each, ast.BinOp) and isinstance(each.op, ast.FloorDiv)]
    return all(any(contains(one.left, each) for one in divisions) for each in products)


def _followed(view: ModuleView, owner: ast.ClassDef, name: str) -> Iterator[FunctionNode]:
    """A method, and the methods of the same object that it calls."""
    methods, pending = view.inherited_methods(owner), [name]
    for each in pending:  # the list grows during the loop
        if (method := methods.get(each)) is not None:
            yield method
            found = map(own_attribute, walk_ast(method))
            pending += [one for one in dict.fromkeys(found) if one and one not in pending]


def in_order(function: FunctionNode) -> list[ast.Attribute]:
    """The attributes in a function, in text order."""
    return in_text_order(each for each in walk_ast(function) if isinstance(each, ast.Attribute))
