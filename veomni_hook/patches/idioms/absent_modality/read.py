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
from veomni_hook.patches.idioms.absent_modality.arguments import (
    DATA,
    Arguments,
    attributes,
    in_order,
    read_arguments,
)
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed

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
        statement: the statement with the condition and the call.
        condition: when upstream makes no call for lack of data.
        given: what the call gives to the method.
        towers: attributes of ``self`` that the method uses.
        outputs: attributes of the result that the forward uses; empty: the result itself.
        embeddings: the name of what the result is merged into.
    """

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
        raise Missed("every batch calls it, unless features are given", around[-1].test)
    given = read_arguments(view, owner, call)
    first, around = _chained(around)
    condition, when = _condition(around, parameter_names(forward), given.data.values())
    statement = first if first is not None and condition is around[0] else condition
    if any(own_attribute(call.func) for each in condition.orelse for call in calls_in(each)):
        raise Missed("its condition has an else that calls a part of the model", condition)
    embeddings = _embeddings(condition)
    if embeddings not in bound_names(before_in(forward, statement)):
        raise Missed(f"{embeddings} is not computed before it", condition)
    return Call(
        statement,
        when,
        given,
        tuple(attributes(view, owner, own_attribute(call.func))),
        _outputs(forward, condition, call),
        embeddings,
    )


def _chained(around: list[ast.If]) -> tuple[ast.If | None, list[ast.If]]:
    """The first statement of a chain, and the conditions without those that only raise errors.

    if pixel_values is not None and features is not None:
        raise ValueError(...)
    elif pixel_values is not None:
    """
    first, rest = None, list(around)
    while (
        len(rest) > 1
        and rest[0].orelse == [rest[1]]
        and all(isinstance(each, ast.Raise) for each in rest[0].body)
    ):
        first, rest = first or rest[0], rest[1:]
    return first, rest


def _condition(around: list[ast.If], given: set[str], data: object) -> tuple[ast.If, Condition]:
    """The statement that asks for data, and what it asks.

    That is the innermost, or one around it that asks as well whether features are given:

        if pixel_values is not None or given.get("image") is not None:
            if given.get("image") is None:
    """
    names = set(data)  # type: ignore[call-overload]
    if bound := [node for each in around for node in walk_ast(each.test) if isinstance(node, ast.NamedExpr)]:
        raise Missed(f"its condition binds {ast.unparse(bound[0].target)}", bound[0])
    asking = [each for each in around if _asked(each.test) & names]
    if not asking:
        raise Missed("its condition does not ask whether its data is None", around[-1].test)
    outer = set[str]().union(*(read_names(each.test) for each in around[:-1]))
    if len(asking) > 1 or asking[0] not in around[-2:] or (asking[0] is around[-1] and outer & DATA):
        raise Missed("several statements decide whether it is called", around[-1])
    condition = asking[0]
    match condition.test:
        case ast.BoolOp(op=ast.Or()) if condition is not around[-1] and _is_lookup(around[-1].test):
            return condition, Condition(f"not ({ast.unparse(condition.test)})")
    if condition is not around[-1]:
        raise Missed("several statements decide whether it is called", around[-1])
    return condition, _asks(condition.test, given, names)


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
    present: list[str] = []
    names: set[str] = set()
    kept: list[str] = []
    lookups: list[str] = []
    for part in parts:
        used = read_names(part)
        match part:
            case ast.Compare() if isinstance(compared_with_none(part, ast.IsNot), ast.Name) and used <= given:
                present += used
                names |= used
            case _ if _is_lookup(part):
                kept.append(ast.unparse(part))
                lookups.append(kept[-1])
            case _ if used and used <= names:
                present.append(ast.unparse(part))
            case ast.Compare() if used in ({"self"}, {_EMBEDDINGS}):
                kept.append(ast.unparse(part))
            case _:
                raise Missed(f"its condition is not about data alone: {ast.unparse(part)}", part)
    if not names & data:
        raise Missed("its condition does not ask whether its data is None", test)
    there = " and ".join(f"{each} is not None" if each in names else each for each in present)
    absent = f"not ({there})" if len(present) > 1 else f"{present[0]} is None"
    further = tuple(each for each in kept if each not in lookups)
    return Condition(" and ".join([absent, *kept]), there, tuple(lookups), further)


def _embeddings(condition: ast.If) -> str:
    """The name to which the condition assigns what it makes of it with ``masked_scatter``."""
    merged = next(filter(None, map(MERGED.match, condition.body)), None)
    return merged["EMBEDS"] if merged else _EMBEDDINGS


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
    apart = {id(each.func) for each in calls_in(forward)}
    apart |= {id(each.value) for each in in_order(forward) if each.attr == "shape"}
    attributes = (each for each in in_order(forward) if id(each) not in apart)
    return tuple(dict.fromkeys(each.attr for each in attributes if ast.unparse(each.value) in held))
