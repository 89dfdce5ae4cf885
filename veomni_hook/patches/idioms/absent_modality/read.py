"""Where a forward computes features of data that a batch may lack: the condition, the call, and its use."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import bound_names, parameter_names, read_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import (
    blocks,
    calls_in,
    compared_with_none,
    contains,
    in_text_order,
    own_attribute,
    walk_ast,
)
from veomni_hook.patches.idioms.absent_modality.arguments import DATA, Arguments, read_arguments
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed

__all__ = ["METHODS", "Call", "before_in", "calls", "read"]

#: The methods whose results replace embeddings of placeholders.
METHODS = ("get_image_features", "get_video_features", "get_audio_features")
MERGED = Template("EMBEDS = EMBEDS.masked_scatter(*ARGUMENTS, **OPTIONS)")
LOOKED_UP = Template("GIVEN.get(KEY)", names="GIVEN")
#: What the results are merged into, unless the condition says so itself.
_EMBEDDINGS = "inputs_embeds"


@dataclass(frozen=True, slots=True)
class Condition:
    """When a forward has data for a call, and when it makes none for lack of data.

    Attributes:
        without: the condition that it makes none.
        present: the condition that there is data; empty: not known apart from given features.
        lookups: the conditions that no features are given.
        further: all other conditions: about the configuration or the embeddings.
    """

    without: str
    present: str = ""
    lookups: tuple[str, ...] = ()
    further: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is made only if a batch has the data.

    Attributes:
        node: the call.
        statement: the statement with the condition and the call.
        condition: when upstream makes no call for lack of data.
        given: what the call gives to the method.
        towers: attributes of ``self`` that the method uses.
        outputs: attributes of the result that the forward uses; empty: the result itself.
        embeddings: the name of what the result is merged into.
    """

    node: ast.Call
    statement: ast.If
    condition: Condition
    given: Arguments
    towers: tuple[str, ...]
    outputs: tuple[str, ...]
    embeddings: str


def calls(forward: FunctionNode) -> Iterator[tuple[ast.Call, list[ast.If]]]:
    """The calls of `METHODS` below a condition, in text order, each with the conditions around it."""
    every = [node for node in walk_ast(forward) if isinstance(node, ast.If)]
    for call in in_text_order(each for each in calls_in(forward) if own_attribute(each.func) in METHODS):
        around = [each for each in every if contains(each, call) and not contains(each.test, call)]
        if around:
            yield call, sorted(around, key=lambda each: each.lineno)


def read(
    view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, call: ast.Call, around: list[ast.If]
) -> Call:
    """Read a call.

    Args:
        view: the module.
        owner: the class of the forward.
        forward: a method with the call.
        call: the call of one of `METHODS`.
        around: the conditions around it, the outermost first.

    Raises:
        Missed: something of it is not known.
    """
    if not any(_asked(each.test) for each in around):
        raise Missed("every batch calls it, unless features are given", around[-1].test, Code.OTHER_FORM)
    name = own_attribute(call.func)
    if (method := view.inherited_methods(owner).get(name)) is None:
        raise Missed(f"{name} is not a method of a class of the file", call, Code.OTHER_FILE)
    given = read_arguments(view, owner, method, call)
    asking = _without_refusals(around)
    condition, when = _condition(asking, parameter_names(forward), {*given.data.values()})
    statement = around[0] if condition is asking[0] else condition
    if any(own_attribute(each.func) for other in condition.orelse for each in calls_in(other)):
        raise Missed("its condition has an else that calls a part of the model", condition, Code.OTHER_FORM)
    merged = next(filter(None, map(MERGED.match, condition.body)), None)
    embeddings = merged["EMBEDS"] if merged else _EMBEDDINGS
    if embeddings not in bound_names(before_in(forward, statement)):
        raise Missed(f"{embeddings} is not computed before it", condition, Code.NO_ROOM)
    towers = tuple(view.attributes_used(owner, method))
    return Call(call, statement, when, given, towers, _outputs(forward, condition, call), embeddings)


def _without_refusals(around: list[ast.If]) -> list[ast.If]:
    """The conditions without those at the begin of a chain that only raise errors.

    if pixel_values is not None and features is not None:
        raise ValueError(...)
    elif pixel_values is not None:
    """
    first, *rest = around
    refuses = all(isinstance(each, ast.Raise) for each in first.body)
    return _without_refusals(rest) if refuses and first.orelse == rest[:1] else around


def _condition(around: list[ast.If], given: set[str], data: set[str]) -> tuple[ast.If, Condition]:
    """The statement that asks for data, and what it asks.

    That is the innermost, or one around it that asks as well whether features are given:

        if pixel_values is not None or given.get("image") is not None:
            if given.get("image") is None:
    """
    if bound := [node for each in around for node in walk_ast(each.test) if isinstance(node, ast.NamedExpr)]:
        raise Missed(f"its condition binds {ast.unparse(bound[0].target)}", bound[0], Code.OTHER_FORM)
    inner = around[-1]
    asking = [each for each in around if _asked(each.test) & data]
    if not asking:
        raise Missed("its condition does not ask whether its data is None", inner.test, Code.OTHER_FORM)
    if asking[0] is inner and DATA.isdisjoint(name for each in around[:-1] for name in read_names(each.test)):
        return inner, _asks(inner.test, given, data)
    match asking:
        case [ast.If(test=ast.BoolOp(op=ast.Or())) as outer] if around[-2:] == [outer, inner]:
            if _is_lookup(inner.test):
                return outer, Condition(f"not ({ast.unparse(outer.test)})")
    raise Missed("several statements decide whether it is called", inner, Code.OTHER_FORM)


def _asked(test: ast.expr) -> set[str]:
    """The names that a condition compares with None."""
    asked = (compared_with_none(node, ast.IsNot) for node in walk_ast(test))
    return {each.id for each in asked if isinstance(each, ast.Name)}


def _is_lookup(part: ast.expr) -> bool:
    """``given.get("image") is None``: no features are given."""
    compared = compared_with_none(part, ast.Is)
    looked_up = LOOKED_UP.match(compared) if compared is not None else None
    return looked_up is not None and isinstance(looked_up.expression("KEY"), ast.Constant)


def _asks(test: ast.expr, given: set[str], data: set[str]) -> Condition:
    """What a condition asks. Data is not absent where features are given, or a part is not configured."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    names: set[str] = set()
    present: list[str] = []
    kept: list[str] = []
    lookups: list[str] = []
    for part in parts:
        used, text = read_names(part), ast.unparse(part)
        compared = compared_with_none(part, ast.IsNot)
        if isinstance(compared, ast.Name) and used <= given:
            present.append(f"{compared.id} is not None")
            names |= used
        elif _is_lookup(part):
            kept.append(text)
            lookups.append(text)
        elif used and used <= names:
            present.append(text)
        elif isinstance(part, ast.Compare) and used in ({"self"}, {_EMBEDDINGS}):
            kept.append(text)
        else:
            raise Missed(f"its condition is not about data alone: {text}", part, Code.OTHER_FORM)
    if not names & data:
        raise Missed("its condition does not ask whether its data is None", test, Code.OTHER_FORM)
    there = " and ".join(present)
    absent = f"not ({there})" if len(present) > 1 else f"{min(names)} is None"
    further = tuple(text for text in kept if text not in lookups)
    return Condition(" and ".join([absent, *kept]), there, tuple(lookups), further)


def before_in(forward: FunctionNode, condition: ast.stmt) -> list[ast.stmt]:
    """The statements that run before a condition, in the blocks around it."""
    found: list[ast.stmt] = []
    for block in blocks(forward):
        for index, statement in enumerate(block):
            if statement is condition or contains(statement, condition):
                found += block[:index]
    return found


def _outputs(forward: FunctionNode, condition: ast.If, call: ast.Call) -> tuple[str, ...]:
    """The attributes of the result that the forward reads.

    Raises:
        Missed: what becomes of the result is not known.
    """
    for node in walk_ast(condition):
        if isinstance(node, ast.Attribute) and node.value is call:
            return (node.attr,)
    places = [each for each in walk_ast(condition) if getattr(each, "value", None) is call]
    targets = [each.targets[0] for each in places if isinstance(each, ast.Assign)]
    targets += [each.target for each in places if isinstance(each, ast.AnnAssign)]
    if not targets or isinstance(targets[0], ast.Tuple | ast.List):
        raise Missed("what becomes of its result is not known", call)
    held = {ast.unparse(targets[0])}
    assigned = in_text_order(node for node in walk_ast(forward) if isinstance(node, ast.Assign))
    # Not `outputs = None` before it: None has no attributes.
    values = [node for node in assigned if getattr(node.value, "value", ...) is not None]
    times = Counter(ast.unparse(each) for node in values for each in node.targets)
    for node in values:
        if ast.unparse(node.value) in held:
            held |= {name for each in node.targets if times[name := ast.unparse(each)] == 1}
    attributes = in_text_order(node for node in walk_ast(forward) if isinstance(node, ast.Attribute))
    apart = {each.func for each in calls_in(forward)} | {
        each.value for each in attributes if each.attr == "shape"
    }
    read = (each.attr for each in attributes if each not in apart and ast.unparse(each.value) in held)
    return tuple(dict.fromkeys(read))
