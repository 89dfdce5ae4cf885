"""What a forward gives to a method that calls a tower, and what it reads of the result."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
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
from veomni_hook.patches.site import Code, Missed
from veomni_hook.patches.upstream_names import names

__all__ = ["DATA", "Arguments", "attributes_read", "read_arguments"]

#: Arguments that say how features are computed, and hold no data.
_OPTIONS = names("options of towers")
_PIXELS, _GRIDS = names("images"), names("grids")
_PATCHES, _PLACED = "patches_by_grid", "patches_with_positions"
_MASK, _LENGTHS = names("mask of pixels"), names("lengths of spectra")
#: The forms of data: the names of the first argument, groups of which it has one each, and others.
_FORMS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "images": (_PIXELS, (), ()),
    _PATCHES: (_PIXELS, (_GRIDS,), names("merge sizes")),
    _PLACED: (_PIXELS, (names("positions of patches"),), names("frames of videos")),
    "images_with_sizes": (_PIXELS, (names("sizes of images"),), ()),
    "patches_by_shape": (_PIXELS, (names("shapes of images"), _MASK), ()),
    "spectra": (names("spectra"), (), _LENGTHS),
}
#: Every name of an argument that holds data.
DATA = {
    name for first, groups, others in _FORMS.values() for group in (first, *groups, others) for name in group
}
#: What a call gives for an argument: data, data that is converted, or a mask that is turned round.
GIVEN = [Template(form, names="HELD") for form in ("HELD", "HELD.to(*PLACE, **OPTIONS)", "~HELD")]
#: How methods show which dimensions pixels have.
FLAT = Template("PATCHES, WIDTH = PIXELS.shape")
GROUPED = (Template("PIXELS.flatten(0, 1)"), Template("BATCH, GROUP, CHANNELS, HEIGHT, WIDTH = PIXELS.shape"))


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a call gives to the method.

    Attributes:
        form: the form of the data.
        data: the names of the method's arguments that hold data, in the order of the call, each with the
            name that the call gives.
        text: the call, with these names, and without ``**kwargs``.
        layout: ``groups`` if images, or frames, come in groups; ``flat`` if the tower takes patches as
            vectors, which it arranges itself; else empty.
    """

    form: str
    data: dict[str, str]
    text: str
    layout: str = ""


def read_arguments(view: ModuleView, owner: ast.ClassDef, method: FunctionNode, call: ast.Call) -> Arguments:
    """Read the arguments of a call of a method.

    Raises:
        Missed: what an argument is for a batch without data is not known.
    """
    parameters = [argument.arg for argument in method.args.args[1:]]
    if len(call.args) > len(parameters) or any(isinstance(argument, ast.Starred) for argument in call.args):
        raise Missed("its arguments are not those of the method", call, Code.OTHER_ARGUMENTS)
    absent = {*_optional(view, owner, method)} | ({*parameters} - read_names(method))
    data: dict[str, str] = {}
    texts: list[str] = []
    for argument, value, label in [
        *((name, value, "") for name, value in zip(parameters, call.args, strict=False)),
        *(
            (keyword.arg, keyword.value, f"{keyword.arg}=")
            for keyword in call.keywords
            if keyword.arg is not None
        ),
    ]:
        text = ast.unparse(value)
        if argument in absent.difference(_OPTIONS):
            text = "None"
        elif argument in DATA:
            data[argument], text = _data(argument, value)
        elif argument not in _OPTIONS:
            raise Missed(
                f"what its argument {argument} is without data is not known", value, Code.OTHER_ARGUMENTS
            )
        texts.append(label + text)
    form, layout = _form(tuple(data), call), ""
    if form == _PATCHES:
        if not _merges(view, owner, method):
            raise Missed("it does not say how many patches become one feature", call, Code.OTHER_ARGUMENTS)
        layout = "flat" if any(_of_pixels(FLAT, forward) for _, forward in view.forwards()) else ""
    elif form in ("images", _PLACED) and any(_of_pixels(grouped, method) for grouped in GROUPED):
        form, layout = "images_in_groups" if form == "images" else form, "groups"
    return Arguments(form, data, f"self.{method.name}({', '.join(texts)})", layout)


def _data(argument: str, value: ast.expr) -> tuple[str, str]:
    """The name of the data, and the text for it; `~` would turn numbers of the data's own dtype round."""
    plain, converted, inverted = (form.match(value) for form in GIVEN)
    if match := plain or converted:
        return match["HELD"], ast.unparse(value)
    if inverted and argument in _LENGTHS:
        return inverted["HELD"], f"{inverted['HELD']}.logical_not()"
    raise Missed(f"its argument {argument} is computed from data", value, Code.READS_VALUES)


def _optional(view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> Iterator[str]:
    """The arguments that may be None: that is their default, and the method asks whether they are.

    What the data itself consists of is none of these, nor data that makes the method raise an error, or call
    a tower once more.
    """
    asked: dict[str, list[ast.AST]] = {}
    for node in (node for function in view.followed(owner, method) for node in walk_ast(function)):
        if isinstance(node, ast.If | ast.IfExp):
            compared = compared_with_none(node.test, ast.Is, ast.IsNot)
            asked.setdefault(getattr(compared, "id", ""), []).append(node)
    arguments = method.args
    for argument, default in zip(reversed(arguments.args), reversed(arguments.defaults), strict=False):
        choices, name = asked.get(argument.arg, []), argument.arg
        may_be = isinstance(default, ast.Constant) and default.value is None
        # It is needed if a choice refuses an absent one, or calls a tower for one that is not.
        inside = [node for choice in choices for node in walk_ast(choice)]
        needed = any(
            isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and own_attribute(node.func))
            for node in inside
        )
        if may_be and choices and name not in DATA.difference(_MASK) and not needed:
            yield name


def _form(data: tuple[str, ...], call: ast.Call) -> str:
    """The form of the data, by the names of its arguments."""
    rest = {*data[1:]}
    for form, (first, groups, others) in _FORMS.items():
        known = rest <= {*others}.union(*groups)
        if data and data[0] in first and known and all(len(rest & {*group}) == 1 for group in groups):
            return form
    raise Missed(f"the form of its data is not known: {', '.join(data)}", call, Code.OTHER_ARGUMENTS)


def _of_pixels(form: Template, method: FunctionNode) -> bool:
    return any(form.match(node, PIXELS=name) for node in walk_ast(method) for name in _PIXELS)


def _merges(view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> bool:
    """Whether a method divides the number of patches (``grid.prod(-1) // merge**2``), or does not use it."""
    nodes = [node for function in view.followed(owner, method) for node in walk_ast(function)]
    products = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "prod"]
    divisions = [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)]
    return all(any(contains(one.left, product) for one in divisions) for product in products)


def attributes_read(forward: FunctionNode, call: ast.Call) -> tuple[str, ...]:
    """The attributes of a call's result that the forward reads; none if it uses the result itself.

    Raises:
        Missed: what becomes of the result is not known.
    """
    attributes = in_text_order(node for node in walk_ast(forward) if isinstance(node, ast.Attribute))
    if direct := [attribute.attr for attribute in attributes if attribute.value is call]:
        return tuple(direct)
    assigned = [
        (ast.unparse(target), node.value)
        for node in in_text_order(n for n in walk_ast(forward) if isinstance(n, ast.Assign | ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        # Not `outputs = None` before it: None has no attributes.
        if node.value is not None and getattr(node.value, "value", ...) is not None
        if not isinstance(target, ast.Tuple | ast.List)
    ]
    holders = {target for target, value in assigned if value is call}
    if not holders:
        raise Missed("what becomes of its result is not known", call)
    times = Counter(target for target, _ in assigned)
    for target, value in assigned:
        if ast.unparse(value) in holders and times[target] == 1:
            holders.add(target)
    apart = {other.func for other in calls_in(forward)}
    apart |= {attribute.value for attribute in attributes if attribute.attr == "shape"}
    read = (
        attribute.attr
        for attribute in attributes
        if attribute not in apart and ast.unparse(attribute.value) in holders
    )
    return tuple(dict.fromkeys(read))
