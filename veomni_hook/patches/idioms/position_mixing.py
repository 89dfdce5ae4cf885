"""Layers that mix the positions of a row: by a convolution, a state space, or another recurrence.

They are known by the names of what they call: the functions of packages for convolutions and scans, and the
methods by which a cache takes the states of such layers. Or a model hands its layers a state of the cache.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import (
    assigned,
    calls_in,
    chain,
    last_name,
    methods_of,
    own_attribute,
    walk_ast,
)
from veomni_hook.patches.routes.view import ModuleView

__all__ = [
    "NAMES", "Mixing", "drops", "handed_down", "hands_to_layers", "held", "layer_loops", "makers", "mixing",
]  # fmt: skip

_FUNCTIONS = (
    r"causal_conv1d(?!_update)|chunk\w*delta|_scan(?![a-z])|mamba_inner|split_conv1d|rwkv_linear_attention"
)
_STATES = r"^(update_conv_state|update_recurrent_state|update_ssm_state|set_linear_cache)$"
_HANDED = "rnn_state"
#: Names of calls in a method that mixes positions.
NAMES = re.compile(f"{_FUNCTIONS}|{_STATES}")
_COMPUTES = re.compile(_FUNCTIONS)
NOTHING = (Template("return"), Template("return None"))
FILLED = Template("LIST.append(ITEM)", names="LIST")
_ARGUMENTS = ("seq_idx", "cu_seqlens")
_LAYERS = ("layers", "blocks")


@dataclass(frozen=True)
class Mixing:
    """A class that mixes positions.

    Attributes:
        name: of the class.
        calls: of its methods, those that compute: the name of the method, and the call.
    """

    name: str
    calls: tuple[tuple[str, ast.Call], ...]

    def takes(self, view: ModuleView) -> tuple[tuple[str, str, str], ...]:
        """What has to run so that the class keeps samples apart without a kernel of ours.

        Returns:
            for each function its name (``self.`` in front of an attribute), the model's argument with the
            boundaries, and the function's parameter for them; empty if some call gets no boundaries.
        """
        requirements: dict[tuple[str, str, str], None] = {}
        for _, call in self.calls:
            function = view.functions.get(last_name(call.func)) if isinstance(call.func, ast.Name) else None
            body = function.body if function is not None else []
            if len(body) == 1 and any(form.match(body[0]) for form in NOTHING):
                continue  # only a package computes it: upstream's returns None
            boundaries = _given(call)
            if boundaries is None or not handed_down(view, self.name, boundaries[0]):
                return ()
            requirements[chain(call.func), *boundaries] = None
        return tuple(requirements)


def mixing(view: ModuleView) -> list[Mixing]:
    """Every class of a module whose methods mix positions."""
    if re.search(f"{_FUNCTIONS}|{_STATES[2:-2]}|{_HANDED}", view.document.source) is None:
        return []
    mixers = [
        Mixing(name, ()) for owner in view.classes.values() for name in _with_states(view.methods(owner))
    ]
    for owner in view.classes.values():
        calls = [(name, call) for name, method in view.methods(owner).items() for call in calls_in(method)]
        if any(NAMES.search(last_name(call.func)) for _, call in calls):
            computing = ((name, call) for name, call in calls if _COMPUTES.search(last_name(call.func)))
            mixers.append(Mixing(owner.name, tuple(computing)))
    return mixers


def _with_states(methods: Mapping[str, FunctionNode]) -> Iterator[str]:
    """The classes of a model's layers if its forward hands them their state."""
    loops = layer_loops(methods["forward"]) if "forward" in methods and "__init__" in methods else ()
    if not any(getattr(node, "attr", "") == _HANDED for loop in loops for node in walk_ast(loop)):
        return
    for attribute, value in assigned(walk_ast(methods["__init__"])):
        if attribute in _LAYERS:
            names = (getattr(call.func, "id", "") for call in calls_in(value))
            yield from (name for name in names if name not in ("", "range"))


def hands_to_layers(method: FunctionNode, argument: str) -> bool:
    """Whether a method hands its layers, in a loop over them, an argument that it got, or all others."""
    return any(_hands(call, method, argument) for loop in layer_loops(method) for call in calls_in(loop))


def drops(owner: ast.ClassDef, forward: FunctionNode, models: set[str]) -> bool:
    """Whether a forward calls one of these models without the arguments that have no name in it."""
    calls = _calls_of(forward, held(methods_of(owner).get("__init__"), models))
    return forward.args.kwarg is not None and not all(_hands(call, forward, "") for call in calls)


def handed_down(view: ModuleView, name: str, argument: str, above: tuple[str, ...] = ()) -> bool:
    """Whether every layer that holds an instance of a class hands it an argument that its model was given.

    Models that hold layers in a list hand on what they were given to all of them, or they do not count. Those
    ``above`` are asked already.
    """
    made = makers(view, {name})
    known = False
    for owner in view.classes.values():
        methods = view.methods(owner)
        attributes = held(methods.get("__init__"), made)
        if not attributes:
            continue
        forward = methods.get("forward")
        if owner.name in above or forward is None:
            return False
        if layer_loops(forward):
            handed = hands_to_layers(forward, argument)
        else:
            calls = [(method, call) for method in methods.values() for call in _calls_of(method, attributes)]
            handed = bool(calls) and all(_hands(call, method, argument) for method, call in calls)
            handed = handed and handed_down(view, owner.name, argument, (*above, name))
        if not handed:
            return False
        known = True
    return known


def makers(view: ModuleView, classes: set[str]) -> set[str]:
    """Classes, and the global names whose value has one of them in it."""
    assignments = (node for node in view.document.tree.body if isinstance(node, ast.Assign))
    holding = (node for node in assignments if _mentions(node.value, classes))
    return classes | {name.id for node in holding for name in node.targets if isinstance(name, ast.Name)}


def _given(call: ast.Call) -> tuple[str, str] | None:
    """The model's argument, and the function's parameter, by which a call passes boundaries."""
    for keyword in call.keywords:
        if keyword.arg is None:
            return "seq_idx", "seq_idx"
        if keyword.arg in _ARGUMENTS and not isinstance(keyword.value, ast.Constant):
            named = (getattr(part, "value", None) for part in walk_ast(keyword.value))
            return next((text for text in named if isinstance(text, str)), keyword.arg), keyword.arg
    return None


def held(init: FunctionNode | None, made: set[str]) -> set[str]:
    """The attributes to which a class assigns an instance."""
    if init is None:
        return set()
    assignments = [node for node in walk_ast(init) if isinstance(node, ast.Assign)]
    targets = [
        target
        for assignment in assignments
        if _mentions(assignment.value, made)
        for target in assignment.targets
    ]
    local = {target.id for target in targets if isinstance(target, ast.Name)}
    for filled in filter(None, map(FILLED.match, walk_ast(init))):
        local |= {filled["LIST"]} if _mentions(filled.expression("ITEM"), made) else set()
    holding = [assignment for assignment in assignments if _mentions(assignment.value, made | local)]
    return {own_attribute(target) for assignment in holding for target in assignment.targets} - {""}


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in walk_ast(node))


def _calls_of(method: FunctionNode, attributes: set[str]) -> list[ast.Call]:
    return [call for call in calls_in(method) if own_attribute(call.func) in attributes]


def _hands(call: ast.Call, method: FunctionNode, argument: str) -> bool:
    rest = method.args.kwarg.arg if method.args.kwarg is not None else None
    return any(
        getattr(keyword.value, "id", "") == rest
        if keyword.arg is None
        else keyword.arg == argument and not isinstance(keyword.value, ast.Constant)
        for keyword in call.keywords
    )


def layer_loops(method: FunctionNode) -> list[ast.For]:
    """The loops of a method over layers of its own, by their names."""
    loops = (node for node in walk_ast(method) if isinstance(node, ast.For))
    return [loop for loop in loops if any(own_attribute(part) in _LAYERS for part in walk_ast(loop.iter))]
