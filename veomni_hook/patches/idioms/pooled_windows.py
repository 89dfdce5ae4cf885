"""Attention to keys that a module of its own pools from windows of positions: called for each sample alone.

    keys, bias = self.compressor(hidden_states, position_ids, cache)
    ->  keys, bias = veomni_windows.separated(
            self, kwargs, self.compressor, attention_mask, cache, "rate"
        )(hidden_states, position_ids, cache)

Such a module drops what fills no window: ``usable = (x.shape[1] // self.rate) * self.rate``. The idiom asks
for no kernel.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.code.tree import blocks, calls_in, methods_of, own_attribute, walk_ast
from veomni_hook.patches.idioms.position_mixing import Mixing, held, makers
from veomni_hook.patches.routes.cache_parameter import cache_parameters
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status

__all__ = ["CANDIDATES", "OP", "WORDS", "find", "pooling"]

OP = "pooled_windows"
WORDS = ".shape[1] // self."
CANDIDATES = (
    "every method that calls an attribute whose class drops the positions that fill no window"
    " (usable = (x.shape[1] // self.rate) * self.rate), except those of such classes"
)
_VARIANT = "by_sample"
_IMPORT = ("veomni_hook.kernels.shared", "pooled_windows as veomni_windows")
_USABLE = Template("USABLE = X.shape[1] // self.SIZE * self.SIZE")
_APPENDED = Template("KEYS, BIAS = self.MODULE(*REST)\nEVERY = torch.cat([OWN, KEYS], dim=2)\n...")
_ADDED = Template("torch.cat([MASK, BIAS.to(MASK.dtype)], dim=-1)")
_PAIR = 2


def pooling(view: ModuleView) -> list[Mixing]:
    """Every class whose methods call a module that pools, with the calls."""
    if (sizes := _sizes(view)) == {}:
        return []
    made = makers(view, {*sizes})
    mixers = []
    for owner in view.classes.values():
        methods = view.methods(owner)
        attributes = held(methods.get("__init__"), made) if owner.name not in sizes else set()
        calls = [
            (name, call)
            for name, method in methods.items()
            for call in calls_in(method)
            if own_attribute(call.func) in attributes
        ]
        if calls:
            mixers.append(Mixing(owner.name, tuple(calls)))
    return mixers


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for mixer in pooling(view):
        for name in dict.fromkeys(name for name, _ in mixer.calls):
            calls = [call for method, call in mixer.calls if method == name]
            target = f"{mixer.name}.{name}"
            try:
                yield _routed(view, target, view.methods(view.classes[mixer.name])[name], calls)
            except Missed as missed:
                yield Site(OP, target, Status.MISSED, reason=missed.reason, lineno=calls[0].lineno)


def _sizes(view: ModuleView) -> dict[str, str]:
    """The classes that pool, with the attribute that says how many positions a window has."""
    if WORDS not in view.document.source:
        return {}
    return {
        owner.name: used["SIZE"]
        for owner, forward in view.forwards()
        for node in walk_ast(forward)
        if (used := _USABLE.match(node)) is not None
    }


def _routed(view: ModuleView, target: str, method: FunctionNode, calls: list[ast.Call]) -> Site:
    """The site of a method.

    Raises:
        Missed: it is not known what it calls, or what it does with the keys.
    """
    if len(calls) > 1 or calls[0].keywords or any(isinstance(one, ast.Starred) for one in calls[0].args):
        raise Missed("it does not call the module once, with arguments alone", calls[0], Code.OTHER_ARGUMENTS)
    (call,) = calls
    module, owner = own_attribute(call.func), view.classes[target.partition(".")[0]]
    init = view.methods(owner)["__init__"]
    kinds = {name: size for name, size in _sizes(view).items() if module in held(init, makers(view, {name}))}
    if len({*kinds.values()}) > 1 or not all(_returns_pairs(view.classes[name]) for name in kinds):
        raise Missed(f"{', '.join(kinds)} return no keys with a bias", call, Code.OTHER_FORM)
    keys = _APPENDED.find(blocks(method), view.scope.dotted, MODULE=module)
    added = [
        found["MASK"]
        for node in walk_ast(method)
        if isinstance(keys, Found)
        and (found := _ADDED.match(node, view.scope.dotted, BIAS=keys["BIAS"])) is not None
    ]
    if len(added) != 1 or added[0] not in parameter_names(method):
        raise Missed("it does not append keys and their bias to its own", call, Code.OTHER_FORM)
    caches = cache_parameters(view, method)
    if len(caches) != 1 or method.args.kwarg is None:
        raise Missed("it does not take a cache, and all other arguments", method, Code.OTHER_ARGUMENTS)
    passed = ", ".join(
        (
            "self",
            method.args.kwarg.arg,
            f"self.{module}",
            added[0],
            caches[0],
            f'"{next(iter(kinds.values()))}"',
        )
    )
    edit = in_place(view, call.func, f"veomni_windows.separated({passed})")
    return Site.calling(
        OP,
        target,
        _VARIANT,
        call,
        [edit],
        _IMPORT,
        captures={"function": module},
        relies_on=tuple(f"{name}.forward" for name in kinds),
    )


def _returns_pairs(owner: ast.ClassDef) -> bool:
    """Whether a forward returns two values, wherever it returns."""
    returns = [node.value for node in walk_ast(methods_of(owner)["forward"]) if isinstance(node, ast.Return)]
    return bool(returns) and all(isinstance(one, ast.Tuple) and len(one.elts) == _PAIR for one in returns)
