"""Rewrites of names: parameters in the whole release, locals, attributes; annotations, decorators."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from tests.rehearsal.code import Facts, Rewrite, odd, stores
from veomni_hook.patches.code.scope import parameter_names, parameters
from veomni_hook.patches.code.tree import last_name

#: How many modules a parameter of forwards must occur in, and how many are renamed at a time.
_COMMON, _AT_A_TIME = 60, 4
#: What decorators of transformers and `generate` read from calls by name, and names of torch's own parameters.
_INTERFACE = set(
    "self input_ids use_cache return_dict input mask device dtype query key value weight bias".split()
)
_WORDS = "recollection visibility whereabouts quarry garment lantern harbour meadow pebble orchard".split()
_DECORATOR = "from transformers.utils.deprecation import deprecate_kwarg as renamed_from"


def facts_of(
    models: Mapping[str, str], shared: Iterable[str], outside: Iterable[str], draw: random.Random
) -> Facts:
    """What a release says of itself: texts of models, of code that is renamed with them, and of code that is not."""
    facts = Facts()
    seen: Counter[str] = Counter()
    for module, text in models.items():
        tree = ast.parse(text)
        forwards = (each for node in tree.body if isinstance(node, ast.ClassDef) for each in node.body)
        named = (
            _named(each) for each in forwards if isinstance(each, ast.FunctionDef) and each.name == "forward"
        )
        seen.update(set().union(*named))
        for node in (each for each in tree.body if isinstance(each, ast.ImportFrom)):
            home = ".".join(module.split(".")[: -node.level]) if node.level else ""
            source = ".".join(part for part in (home, node.module) if part)
            facts.imported.setdefault(source, set()).update(each.name for each in node.names)
    elsewhere = [node for text in outside for node in ast.walk(ast.parse(text))]
    facts.kept.update(
        node.name for node in elsewhere if isinstance(node, ast.FunctionDef) and node.name != "forward"
    )
    for node in (*elsewhere, *(each for text in shared for each in ast.walk(ast.parse(text)))):
        if isinstance(node, ast.Attribute):
            facts.foreign.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            facts.foreign.add(node.value)
    common = [n for n in seen if seen[n] >= _COMMON and n not in _INTERFACE and not n.startswith("output_")]
    chosen = draw.sample(sorted(common), min(_AT_A_TIME, len(common)))
    for old, word in zip(chosen, draw.sample(_WORDS, len(chosen)), strict=True):
        used = any(re.search(rf"\b{word}\b", text) for text in models.values())
        facts.names[old] = f"{word}_of_{old}" if used else word
    return facts


def _named(function: ast.FunctionDef) -> set[str]:
    given = function.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _renames(function: ast.FunctionDef, facts: Facts) -> bool:
    return function.name not in facts.kept and not function.name.startswith("__")


def parameters_renamed(rewrite: Rewrite) -> None:
    """Parameters in all modules at once, with the keywords of their callers; a decorator takes the old keyword."""
    facts = rewrite.facts
    changed = False
    for node in list(ast.walk(rewrite.tree)):
        if isinstance(node, ast.FunctionDef) and _renames(node, facts):
            for name in sorted(_named(node) & facts.names.keys()):
                _rename(node, name, facts.names[name])
                if node.name == "forward" or not node.name.startswith("_"):
                    call = f"renamed_from({name!r}, '99.0.0', new_name={facts.names[name]!r})"
                    node.decorator_list.append(ast.parse(call, mode="eval").body)
                    changed = True
        elif isinstance(node, ast.Call):
            _in_call(node, facts)
        elif isinstance(node, ast.Subscript | ast.Compare):
            _in_keywords(node, facts.names)
    if changed:
        rewrite.insert(_DECORATOR)


def _rename(function: ast.FunctionDef, old: str, new: str) -> None:
    for part in (function.args, *function.body):
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and node.id == old:
                node.id = new
            elif isinstance(node, ast.arg) and node.arg == old and part is function.args:
                node.arg = new


def _in_call(call: ast.Call, facts: Facts) -> None:
    callee = last_name(call.func)
    if callee in ("get", "pop") and isinstance(call.func, ast.Attribute) and call.args:
        if ast.unparse(call.func.value).endswith("kwargs"):
            _text(call.args[0], facts.names)
    if callee in facts.kept or callee[:1].isupper() or callee in ("partial", "dict", "update", "replace"):
        return  # functions elsewhere, classes with fields of the name
    for keyword in call.keywords:
        if keyword.arg in facts.names:
            keyword.arg = facts.names[keyword.arg]


def _in_keywords(node: ast.Subscript | ast.Compare, names: Mapping[str, str]) -> None:
    match node:
        case ast.Subscript(value=ast.Name(home), slice=text):
            pass
        case ast.Compare(left=text, ops=[ast.In() | ast.NotIn()], comparators=[ast.Name(home)]):
            pass
        case _:
            return
    if home.endswith("kwargs"):
        _text(text, names)


def _text(node: ast.expr, names: Mapping[str, str]) -> None:
    if isinstance(node, ast.Constant) and node.value in names:
        node.value = names[node.value]


def locals_renamed(rewrite: Rewrite) -> None:
    """Names that a function binds itself."""
    for _, function in rewrite.functions():
        if odd(function):
            continue
        once = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        others = set(parameter_names(function))
        for node in ast.walk(function):
            if (
                isinstance(node, ast.alias | ast.ExceptHandler | ast.FunctionDef | ast.Lambda)
                and node is not function
            ):
                others |= {name for name in stores(ast.Module([ast.Expr(node)], []))}  # type: ignore[arg-type]
                others |= {getattr(node, "name", "") or ""}
        for name in sorted(once - others):
            if rewrite.chance():
                new = rewrite.fresh("value")
                for node in ast.walk(function):
                    if isinstance(node, ast.Name) and node.id == name:
                        node.id = new


def attributes_renamed(rewrite: Rewrite) -> None:
    """``self.x`` where nothing but methods of the module reads it, and it holds no module or tensor."""
    if rewrite.facts.imported.get(rewrite.module, set()) & {
        node.name for node in rewrite.tree.body if isinstance(node, ast.ClassDef)
    }:
        return  # others inherit from its classes
    other, bound = _attributes(rewrite.tree)
    other |= rewrite.facts.foreign
    new = {
        name: f"own_{name}"
        for name in sorted(bound)
        if bound[name] and name not in other and not name.startswith("_") and rewrite.chance()
    }
    for node in ast.walk(rewrite.tree):
        if isinstance(node, ast.Attribute) and _own(node):
            node.attr = new.get(node.attr, node.attr)


def _attributes(tree: ast.Module) -> tuple[set[str], dict[str, bool]]:
    """Attributes that are read otherwise than from ``self``; those bound to ``self``, and whether to plain values."""
    other: set[str] = set()
    bound: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _own(node) and "config" not in ast.unparse(node.value):
            other.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            other.add(node.value)
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                other.update([each.name] if isinstance(each, ast.FunctionDef) else stores(each))
        elif isinstance(node, ast.Assign):
            for target in (each for one in node.targets for each in ast.walk(one)):
                if isinstance(target, ast.Attribute) and _own(target):
                    bound[target.attr] = bound.get(target.attr, True) and _plain(node.value)
    return other, bound


def _own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _plain(value: ast.expr) -> bool:
    """Whether a value is a number, a text or such of a configuration: no call makes it."""
    return not any(
        isinstance(node, ast.Call) and last_name(node.func) not in _PLAIN for node in ast.walk(value)
    )


_PLAIN = ("getattr", "len", "int", "max", "min", "float", "bool", "sum", "round")


def decorated(rewrite: Rewrite) -> None:
    """A decorator that changes nothing, on forwards and functions that have none."""
    name = rewrite.fresh("transparent")
    for owner, function in rewrite.functions():
        hidden = function.name.startswith("__") or odd(function)
        if not function.decorator_list and not hidden and rewrite.draw.random() < 0.4:
            if owner is None or function.name == "forward":
                function.decorator_list.append(ast.Name(name, ast.Load()))
    rewrite.insert(f"""
import functools as functools_of_{name}
def {name}(function):
    @functools_of_{name}.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call
""")


def annotations_dropped(rewrite: Rewrite) -> None:
    """Types of parameters and results, except those of configurations, which the proof builds modules by."""
    for _, function in rewrite.functions():
        function.returns = None
        for parameter in parameters(function):
            if parameter.annotation is not None and "Config" not in ast.unparse(parameter.annotation):
                if function.name != "__init__" and rewrite.chance():
                    parameter.annotation = None
