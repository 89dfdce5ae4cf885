"""Where a forward computes features of data that a batch may lack: the condition, the call, and its use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.expressions import own_attribute
from veomni_hook.patches.code.scope import bound_names, parameter_names
from veomni_hook.patches.code.statements import blocks
from veomni_hook.patches.code.walk import contains, walk_ast
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed

__all__ = ["EMBEDDINGS", "METHODS", "Call", "calls", "read"]

#: The methods whose results replace embeddings of placeholders.
METHODS = ("get_image_features", "get_video_features", "get_audio_features")
#: What the results are merged into.
EMBEDDINGS = "inputs_embeds"
#: Arguments that say how features are computed, and hold no data.
_OPTIONS = frozenset(
    (
        "interpolate_pos_encoding",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "vision_feature_layer",
        "vision_feature_select_strategy",
    )
)
#: The forms of data: the names of arguments, in the order of the call.
_PATCHES, _IMAGES, _SPECTRA = "patches_by_grid", "images", "spectra"
_GRIDS = ("image_grid_thw", "video_grid_thw")
_PIXELS = ("pixel_values", "pixel_values_videos", "pixel_values_images")
_FEATURES = ("input_features",)
_MASKS = ("feature_attention_mask", "input_features_mask", "audio_feature_lengths")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is made only if a batch has the data.

    Attributes:
        condition: the statement with the condition and the call.
        without: the condition that upstream makes no call for lack of data.
        form: the form of the data.
        data: the arguments that hold data, in the order of the call.
        text: the call, with the names in ``data`` for them.
        towers: attributes of ``self`` that the method uses.
        outputs: attributes of the result that the forward uses; empty: the result itself.
    """

    condition: ast.If
    without: str
    form: str
    data: tuple[str, ...]
    text: str
    towers: tuple[str, ...]
    outputs: tuple[str, ...]


def calls(forward: FunctionNode) -> Iterator[tuple[ast.Call, list[ast.If]]]:
    """The calls of `METHODS` below a condition, in text order, each with the conditions around it."""
    every = [node for node in walk_ast(forward) if isinstance(node, ast.If)]
    found = [
        node
        for node in walk_ast(forward)
        if isinstance(node, ast.Call) and own_attribute(node.func) in METHODS
    ]
    for call in sorted(found, key=lambda each: (each.lineno, each.col_offset)):
        around = [each for each in every if contains(each, call) and not contains(each.test, call)]
        if around:
            yield call, around


def read(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, call: ast.Call, around: list[ast.If]
) -> Call:
    """Read a call.

    Raises:
        Missed: something of it is not known.
    """
    condition = around[0]
    if len(around) > 1 or condition not in forward.body:
        raise Missed("several statements decide whether it is called", around[-1])
    if condition.orelse:
        raise Missed("its condition has an else", condition)
    before = forward.body[: forward.body.index(condition)]
    if EMBEDDINGS not in bound_names(before):
        raise Missed(f"{EMBEDDINGS} is not computed before it", condition)
    data, text = _arguments(view, owner, call)
    form = _form(tuple(data), call)
    if form == _PATCHES and not _merges(view, owner, own_attribute(call.func)):
        raise Missed("it does not say how many patches become one feature", call)
    if form == _IMAGES and (line := _groups(_method(view, owner, own_attribute(call.func)))):
        raise Missed(f"its images come in groups, which it counts (line {line})", call)
    return Call(
        condition,
        _without(condition.test, parameter_names(forward), data.values()),
        form,
        tuple(data),
        text,
        tuple(_attributes(view, owner, own_attribute(call.func))),
        _outputs(forward, condition, call),
    )


def _without(test: ast.expr, given: set[str], data: object) -> str:
    """The condition under which data is absent: not where features are given, or a part is not configured."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    present: list[str] = []
    names: set[str] = set()
    kept: list[str] = []
    for part in parts:
        match part:
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]
            ) if name in given:
                present.append(name)
                names.add(name)
            case ast.Compare(
                left=ast.Call(func=ast.Attribute(value=ast.Name(), attr="get"), args=[ast.Constant()]),
                ops=[ast.Is()],
                comparators=[ast.Constant(value=None)],
            ):
                kept.append(ast.unparse(part))
            case _:
                used = {each.id for each in walk_ast(part) if isinstance(each, ast.Name)}
                if used and used <= names:
                    present.append(ast.unparse(part))
                elif used == {"self"} and isinstance(part, ast.Compare):
                    kept.append(ast.unparse(part))
                else:
                    raise Missed(f"its condition is not about data alone: {ast.unparse(part)}", part)
    if not names & set(data):  # type: ignore[call-overload]
        raise Missed("its condition does not ask whether its data is None", test)
    absent = f"{present[0]} is None"
    if len(present) > 1:
        asked = [f"{each} is not None" if each in names else each for each in present]
        absent = f"not ({' and '.join(asked)})"
    return " and ".join([absent, *kept])


def _arguments(view: ModuleView, owner: ast.ClassDef, call: ast.Call) -> tuple[dict[str, str], str]:
    """The data of a call, by the method's names, and the call with these for it and without ``**kwargs``."""
    method = _method(view, owner, own_attribute(call.func))
    if method is None:
        raise Missed(f"{own_attribute(call.func)} is not a method of a class of the file", call)
    names = [each.arg for each in method.args.args[1:]]
    if len(call.args) > len(names) or any(isinstance(each, ast.Starred) for each in call.args):
        raise Missed("its arguments are not those of the method", call)
    data: dict[str, str] = {}
    texts: list[str] = []
    for name, value, named in [
        *((name, value, False) for name, value in zip(names, call.args, strict=False)),
        *((each.arg, each.value, True) for each in call.keywords if each.arg is not None),
    ]:
        text = ast.unparse(value)
        if name in _OPTIONS:
            pass
        elif name not in (*_PIXELS, *_GRIDS, *_FEATURES, *_MASKS):
            raise Missed(f"what its argument {name} is without data is not known", value)
        elif not isinstance(value, ast.Name):
            raise Missed(f"its argument {name} is computed from data", value)
        else:
            data[name] = text = value.id
        texts.append(f"{name}={text}" if named else text)
    return data, f"self.{own_attribute(call.func)}({', '.join(texts)})"


def _form(data: tuple[str, ...], call: ast.Call) -> str:
    """The form of the data, by the names of its arguments."""
    first, rest = data[:1], data[1:]
    if first and first[0] in _PIXELS and not rest:
        return _IMAGES
    if first and first[0] in _PIXELS and len(rest) == 1 and rest[0] in _GRIDS:
        return _PATCHES
    if first and first[0] in _FEATURES and rest and all(each in _MASKS for each in rest):
        return _SPECTRA
    raise Missed(f"the form of its data is not known: {', '.join(data)}", call)


def _groups(method: FunctionNode | None) -> int:
    """The line where a method merges or counts the first of five dimensions; 0 if it does not."""
    for node in walk_ast(method) if method is not None else ():
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(name), attr="flatten"),
                args=[ast.Constant(0), ast.Constant(1)],
            ) if name in _PIXELS:
                return node.lineno
            case ast.Assign(
                targets=[ast.Tuple(elts=[_, _, _, _, _])],
                value=ast.Attribute(value=ast.Name(name), attr="shape"),
            ) if name in _PIXELS:
                return node.lineno
    return 0


def _method(view: ModuleView, owner: ast.ClassDef, name: str) -> FunctionNode | None:
    for each in view.scope.ancestors(owner):
        if each is not None and (method := view.methods(each).get(name)) is not None:
            return method
    return None


def _merges(view: ModuleView, owner: ast.ClassDef, name: str) -> bool:
    """Whether a method divides the number of patches (``grid.prod(-1) // merge**2``), or does not use it."""
    nodes = [node for method in _followed(view, owner, name) for node in walk_ast(method)]
    products = [each for each in nodes if isinstance(each, ast.Attribute) and each.attr == "prod"]
    divisions = [each for each in nodes if isinstance(each, ast.BinOp) and isinstance(each.op, ast.FloorDiv)]
    return all(any(contains(one.left, each) for one in divisions) for each in products)


def _attributes(view: ModuleView, owner: ast.ClassDef, name: str) -> Iterator[str]:
    """The attributes of ``self``, other than methods, that a method uses, with the methods that it calls."""
    used = [each for method in _followed(view, owner, name) for each in map(own_attribute, _in_order(method))]
    for found in dict.fromkeys(used):
        if found and found != "config" and _method(view, owner, found) is None:
            yield found


def _followed(view: ModuleView, owner: ast.ClassDef, name: str) -> Iterator[FunctionNode]:
    """A method, and the methods of the same object that it calls."""
    pending = [name]
    for each in pending:  # the list grows during the loop
        method = _method(view, owner, each)
        if method is not None:
            yield method
            found = map(own_attribute, walk_ast(method))
            pending += [one for one in dict.fromkeys(found) if one and one not in pending]


def _outputs(forward: FunctionNode, condition: ast.If, call: ast.Call) -> tuple[str, ...]:
    """The attributes of the result that the forward reads.

    Raises:
        Missed: what becomes of the result is not known.
    """
    for node in walk_ast(condition):
        if isinstance(node, ast.Attribute) and node.value is call:
            return (node.attr,)
    target = next(
        (
            each.targets[0] if isinstance(each, ast.Assign) else each.target
            for block in blocks(condition)
            for each in block
            if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is call
        ),
        None,
    )
    if target is None or isinstance(target, ast.Tuple | ast.List):
        raise Missed("what becomes of its result is not known", call)
    held = ast.unparse(target)
    read = [each.attr for each in _in_order(forward) if ast.unparse(each.value) == held]
    return tuple(dict.fromkeys(read))


def _in_order(function: FunctionNode) -> list[ast.Attribute]:
    """The attributes in a function, in text order."""
    found = [each for each in walk_ast(function) if isinstance(each, ast.Attribute)]
    return sorted(found, key=lambda each: (each.lineno, each.col_offset))
