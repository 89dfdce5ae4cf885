"""What mixes positions in layers, and may: it gets all of them, or those of whole segments.

Attention of the user's implementation, and the rules and convolutions of linear attention that their own
idioms route, see all positions (`veomni_hook.parallel`). In a tower, attention stays within segments.
Everything else of such layers must work on each position by itself. The cache is empty: nothing with keys or
states enters layers that are split.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import own_names, parameter_names
from veomni_hook.patches.code.template import Found
from veomni_hook.patches.code.tree import last_name, own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.known_names import ATTENTION_ARGUMENTS
from veomni_hook.patches.idioms.layer_loop.values import (
    NOTHING,
    PLAIN,
    Arguments,
    Items,
    Plain,
    Tensor,
    Unknown,
    Value,
    Whole,
    holds_tensor,
    is_shaped,
    shaped,
)
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.site import Code, Missed

__all__ = ["STATE", "attended", "by_segment", "convolved", "of_cache", "ruled"]

#: The state of a rule, which is that of a share of the heads.
STATE = Unknown("the state of a rule, which is that of a share of the heads")
_CONVOLUTION = ("hidden_states", "weight", "bias", "activation")
_BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
_RULE = ("query", "key", "value", "g", "beta")
_ATTENTION = ("module", "query", "key", "value", "attention_mask")
#: The arguments of fused attention that hold boundaries of segments.
_ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")


def attended(arguments: Arguments) -> Value:
    """Attention of the user's implementation: what it gets must be what the all-to-all expects."""
    passed = {**dict(zip(_ATTENTION, arguments.given, strict=False)), **arguments.named}
    for name in _RULE[:3]:
        if not is_shaped(passed.get(name), "B . S .", "1 . S ."):
            raise Missed(f"the {name} of its attention is not [batch, heads, positions, width]")
    for name, value in passed.items():
        if name not in (*_ATTENTION, *ATTENTION_ARGUMENTS):
            raise Missed(f"its attention takes {name}, which may hold positions", code=Code.MIXES_POSITIONS)
        if name not in _ATTENTION[:4] and holds_tensor(value):
            raise Missed(f"its attention takes a part of the positions as {name}", code=Code.MIXES_POSITIONS)
    return Items((shaped("B S . ."), Unknown("attention weights, which hold a part of the positions")))


def convolved(arguments: Arguments, function: FunctionNode) -> Value:
    """A convolution whose rank gets the last positions of the rank before it."""
    passed = _passed(arguments, _CONVOLUTION, function)
    x = passed.pop("hidden_states", None)
    if x is None or not is_shaped(x, "B . S"):
        raise Missed("what its convolution gets is not [batch, channels, positions]")
    _check_others(passed, "convolution")
    return x


def ruled(arguments: Arguments, function: FunctionNode) -> Value:
    """A rule that gets all positions of a share of the heads."""
    passed = _passed(arguments, _RULE, function)
    for name in _RULE:
        # A decay is one number a head, or one a channel of it.
        shapes = {"g": ("B S .", "B S . ."), "beta": ("B S .",)}.get(name, ("B S . .",))
        if not is_shaped(passed.pop(name, None), *shapes):
            raise Missed(f"the {name} of its rule is not [batch, positions, heads, ...]")
    _check_others(passed, "rule")
    return Items((shaped("B S . ."), STATE))


def _passed(arguments: Arguments, names: tuple[str, ...], function: FunctionNode) -> dict[str, Value]:
    """The arguments by name, without those of ``**`` that the function does not read, nor its kernels."""
    read = {*parameter_names(function), *_BOUNDARIES}
    unread = {name for name, _ in (arguments.bag.held if arguments.bag else ())} - read
    named = {name: value for name, value in arguments.named.items() if name not in unread}
    return {**dict(zip(names, arguments.given, strict=False)), **named}


def _check_others(passed: Mapping[str, Value], what: str) -> None:
    """What else a call gets holds all positions, or none."""
    for name, value in passed.items():
        if holds_tensor(value):
            raise Missed(f"its {what} takes a part of the positions as {name}", code=Code.MIXES_POSITIONS)


def of_cache(name: str, arguments: Arguments) -> Value | None:
    """What a method of an empty cache returns; None for another method."""
    stored = arguments.given[:2]
    tensors = [isinstance(value, Tensor) for value in stored]
    if name == "update" and tensors == [True, True]:
        return Items(stored)  # what it is given
    if name in ("get_conv_state", "get_recurrent_state"):
        return NOTHING
    if name == "has_previous_state":
        return Plain(False)
    if name == "update_conv_state" and tensors[:1] == [True]:
        return stored[0]  # zeros in front of it, which the convolution leaves out
    return PLAIN if name == "update_recurrent_state" else None


def by_segment(found: Found, fused: list[ast.stmt], frame: Frame[Value]) -> set[str]:
    """Attention within segments, by one fused call or by segment: their boundaries."""
    at = found.first
    if found.index:
        raise Missed("attention by segment begins with other statements", at, Code.NO_BOUNDARIES)
    for name in _tensors(found):
        if not is_shaped(frame.values.get(name), ". . S ."):
            raise Missed(f"the {name} of its attention is not [1, heads, rows, width]", at)
    boundaries = frame.values.get(found["CU_SEQLENS"])
    if not isinstance(boundaries, Whole) or not boundaries.rows:
        raise Missed("the boundaries of its attention are not those of the tower", at, Code.NO_BOUNDARIES)
    _check_fused(found, fused, at)
    for name in own_names([*found.block[found.index :], *fused]):
        frame.values[name] = Unknown(f"{name}, which attention computes")
    frame.values[found["OUTPUT"]] = shaped("1 S . .")
    return {*boundaries.rows}


def _check_fused(found: Found, fused: list[ast.stmt], at: ast.AST) -> None:
    """Raise unless the other branch is one call of attention with the same tensors and boundaries."""
    calls = [
        node
        for statement in fused
        for node in walk_ast(statement)
        if isinstance(node, ast.Call) and {keyword.arg for keyword in node.keywords} & {*_ENDS}
    ]
    results = [
        statement for statement in fused if isinstance(statement, ast.Assign) and statement.value in calls
    ]
    if len(calls) != 1 or len(results) != 1:
        raise Missed("the other way to its attention has no boundaries", at, Code.NO_BOUNDARIES)
    (call,), target = calls, results[0].targets[0]
    first = target.elts[0] if isinstance(target, ast.Tuple) else target
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    given = [ast.unparse(argument) for argument in call.args]
    others = [statement for statement in fused if statement is not results[0]]
    called = [node.func for other in others for node in walk_ast(other) if isinstance(node, ast.Call)]
    if (
        [named.get(name) for name in _ENDS] != [found["CU_SEQLENS"]] * 2
        or given[1:] != _tensors(found)
        or last_name(first) != found["OUTPUT"]
        or any(map(own_attribute, called))
    ):
        raise Missed("the other way to its attention has other operands", at, Code.NO_BOUNDARIES)


def _tensors(found: Found) -> list[str]:
    return [found[name] for name in ("QUERY", "KEY", "VALUE")]
