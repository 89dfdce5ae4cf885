"""Evaluate linear attention in layer code: its convolution, its rule, its cache and its mask.

Their own idioms route the convolution and the rule, and what they route sees all positions
(`veomni_hook.parallel.linear_attention`). Everything else of such a layer must work on each position by
itself, as in other layers. The cache is empty: nothing with keys or states enters layers that are split.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping

from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import last_name
from veomni_hook.patches.idioms.causal_conv import find as causal_conv
from veomni_hook.patches.idioms.gated_delta_rule import find as gated_delta_rule
from veomni_hook.patches.idioms.layer_loop.calls import CallArguments
from veomni_hook.patches.idioms.layer_loop.expressions import Environment
from veomni_hook.patches.idioms.layer_loop.parts import Parts
from veomni_hook.patches.idioms.layer_loop.shapes import fresh
from veomni_hook.patches.idioms.layer_loop.values import (
    BATCH,
    NOTHING,
    PLAIN,
    POSITIONS,
    Items,
    Maybe,
    Module,
    Operation,
    Own,
    Plain,
    Tensor,
    Unknown,
    Value,
    Whole,
    is_positional,
    of_all,
)
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed, Site, Status

__all__ = ["LinearAttention"]

_HIDDEN_STATES = ("hidden_states", "weight", "bias", "activation")
_BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
_RULE = ("query", "key", "value", "g", "beta")
#: Methods of a cache that layers fill, which return nothing while it is empty.
_STATES = ("get_conv_state", "get_recurrent_state")
_FALSE = Plain(False)
_STATE = Unknown("the state of a rule, which is that of a share of the heads")
_CASTS = ("to", "float")
#: What a mask of padding has: a number for each position.
_OF_POSITIONS = Tensor(((BATCH,), (POSITIONS,)))


class LinearAttention(Parts):
    """Evaluates layers of linear attention.

    Args:
        view: the file.
    """

    def __init__(self, view: ModuleView) -> None:
        super().__init__(view)
        self._rules = _routed(view, gated_delta_rule.find)
        # Layers are counted by their rules when they run: one that convolves alone would count as missed.
        self._convolutions = _routed(view, causal_conv.find) if self._rules else frozenset()
        #: Arguments of calls that must be this process's part of a mask.
        self.masks: dict[int, ast.expr] = {}

    def call(self, node: ast.Call, scope: Environment) -> Value:
        """The result of a call.

        Raises:
            Missed: it moves or mixes positions, or cannot be followed.
        """
        place = self.view.document.start(node.func)
        if place in self._convolutions:
            return self._convolved(node, scope)
        if place in self._rules:
            return self._followed_rule(node, scope)
        try:
            return super().call(node, scope)
        except Missed:
            if not (masks := self._masks(node, scope)):
                raise
            # As upstream's function that zeroes what is padded: it needs the mask of the same positions.
            result = super().call(node, {**scope, **{each.id: _OF_POSITIONS for each in masks}})
        self.masks.update({id(each): each for each in masks})
        return result

    _call = call

    def _convolved(self, node: ast.Call, scope: Environment) -> Value:
        """A convolution whose rank gets the last positions of the rank before it."""
        passed = self._passed(node, scope, _HIDDEN_STATES)
        x = passed.pop("hidden_states", None)
        dims = x.dims if isinstance(x, Tensor) else ()
        if len(dims) != 3 or dims[0] != (BATCH,) or dims[2] != (POSITIONS,) or is_positional(dims[1]):
            raise Missed("what its convolution gets is not [batch, channels, positions]", node)
        _check_others(passed, "convolution", node)
        return Tensor(dims)

    def _followed_rule(self, node: ast.Call, scope: Environment) -> Value:
        """A rule that gets all positions of a share of the heads."""
        passed = self._passed(node, scope, _RULE)
        for name in _RULE:
            tensor = passed.pop(name, None)
            dims = tensor.dims if isinstance(tensor, Tensor) else ()
            # A decay is one number a head, or one a channel of it.
            rank = 4 if name in _RULE[:3] or (name == "g" and len(dims) == 4) else 3
            right = len(dims) == rank and dims[:2] == ((BATCH,), (POSITIONS,))
            if not right or any(map(is_positional, dims[2:])):
                raise Missed(f"the {name} of its rule is not [batch, positions, heads, ...]", node)
        _check_others(passed, "rule", node)
        result = Tensor(((BATCH,), (POSITIONS,), fresh(), fresh()))
        return Items((result, _STATE))

    def _passed(self, node: ast.Call, scope: Environment, names: tuple[str, ...]) -> dict[str, Value]:
        given = self._arguments(node, scope)
        held = () if given.bag is None else given.bag.held
        unread = {name for name, _ in held} - self._read_by(node.func)
        named = {name: value for name, value in given.named.items() if name not in unread}
        return {**dict(zip(names, given.given, strict=False)), **named}

    def _read_by(self, called: ast.expr) -> set[str]:
        """The keyword arguments that a routed function reads; its kernels read those and boundaries."""
        return {*parameter_names(self.view.functions[last_name(called)]), *_BOUNDARIES}

    def _attribute(self, node: ast.Attribute, scope: Environment) -> Value:
        if node.attr in _CASTS and self.evaluate(node.value, scope) == _STATE:
            return Operation(_STATE, node.attr)
        return super()._attribute(node, scope)

    def _masks(self, node: ast.Call, scope: Environment) -> list[ast.Name]:
        """The masks that a method passes to a function of the file."""
        if not isinstance(scope.get("self"), Own) or not isinstance(node.func, ast.Name):
            return []
        if node.func.id not in self.view.scope.functions or node.func.id in scope:
            return []
        passed = [*node.args, *(each.value for each in node.keywords)]
        return [each for each in passed if isinstance(each, ast.Name) and _is_mask(scope.get(each.id))]

    def _operation(self, function: Operation, arguments: CallArguments, node: ast.Call) -> Value:
        if isinstance(function.value, Whole):
            if function.name in _STATES:
                return NOTHING
            if function.name == "has_previous_state":
                return _FALSE
            stored = arguments.given[:1]
            if function.name == "update_conv_state" and stored and isinstance(stored[0], Tensor):
                return stored[0]  # zeros in front of it, which the convolution leaves out
            if function.name == "update_recurrent_state":
                return PLAIN
        if function.value == _STATE:
            return _STATE
        return super()._operation(function, arguments, node)

    def _boolop(self, node: ast.BoolOp, scope: Environment) -> Value:
        # `cache is not None and cache.has_previous_state()` is kept in a name.
        asks = [each for each in node.values if isinstance(each, ast.Call)]
        others = [each for each in node.values if not isinstance(each, ast.Compare | ast.Call | ast.Name)]
        if isinstance(node.op, ast.And) and not others:
            if any(self.evaluate(each, scope) == _FALSE for each in asks):
                return _FALSE
        return super()._boolop(node, scope)

    def _subscript(self, node: ast.Subscript, scope: Environment) -> Value:
        if self.attributes.is_look_up(node.value):
            return Module((":activation",))
        return super()._subscript(node, scope)


def _routed(view: ModuleView, find: Callable[[ModuleView], Iterator[Site]]) -> set[int]:
    """Where the names of functions begin whose calls an idiom routes."""
    found = (each for each in view.sites(find) if each.status is Status.ROUTED)
    return {edit.start for site in found for edit in site.edits}


def _is_mask(value: Value | None) -> bool:
    value = value.value if isinstance(value, Maybe) else value
    return isinstance(value, Whole) and "mask" in value.name


def _check_others(passed: Mapping[str, Value], what: str, node: ast.AST) -> None:
    """What else a call gets holds all positions, or none."""
    for name, value in passed.items():
        if any(isinstance(each, Tensor) for each in of_all([value])):
            raise Missed(f"its {what} takes a part of the positions as {name}", node)
