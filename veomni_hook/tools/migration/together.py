"""Patches of one config that belong together: one that applies must not meet code that another would replace.

Two patches belong together where one calls, or reads, what the other changes: a function with other
parameters or another result, an attribute that only the other sets. If one of them does not apply, neither
does the other, although its own target is what it was written for.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.scope import global_uses
from veomni_hook.patches.code.snippet import read_snippet
from veomni_hook.patches.code.tree import calls_in, last_name, own_attribute, walk_ast
from veomni_hook.patches.spec import Patch, PatchConfig
from veomni_hook.patches.verbs.targets import top_level
from veomni_hook.tools.lock.signatures import parameters_of

__all__ = ["needing", "unfit"]


def needing(
    config: PatchConfig, fitting: Sequence[Patch], lost: Sequence[Patch], now: Document, base: Document
) -> dict[int, str]:
    """Return why patches that apply on their own do not without others, by their index.

    Args:
        config: the config, for messages.
        fitting: its patches that apply, each on its own.
        lost: its other patches.
        now: the module in the release that is judged.
        base: the module in the release that the config was made for.

    Raises:
        ReplacementError: the source of a patch cannot be read.
    """
    left = {index: list(_changes(config, patch, now, base)) for index, patch in enumerate(fitting)}
    gone = [change for patch in lost for change in _changes(config, patch, now, base)]
    classes = dict(_classes(now.tree))
    there = [f for f in _functions(now.tree) if f.name.partition(".")[0] not in config.exclude]
    reasons: dict[int, str] = {}
    while True:
        kept = {change.name for changes in left.values() for change in changes}
        callers = [f for f in there if f.name not in kept]
        said = {
            index: why for index, changes in left.items() if (why := _why(changes, gone, callers, classes))
        }
        if not said:
            return reasons
        reasons |= said
        gone += [change for index in said for change in left.pop(index)]


def unfit(config: PatchConfig, patches: Sequence[Patch], document: Document) -> list[str]:
    """Return the definitions that a config leaves out and that do not work beside its patches.

    They call what a patch replaces with arguments that the replacement does not take, or use one that does.

    Args:
        config: the config.
        patches: some of its patches.
        document: the module's source.

    Raises:
        ReplacementError: the source of a patch cannot be read.
    """
    changes = [change for patch in patches for change in _changes(config, patch, document, document)]
    replaced = {change.name for change in changes}
    left_out = {name: top_level(document, name) for name in dict.fromkeys(config.exclude)}
    found = {
        function.name.partition(".")[0]
        for function in _functions(document.tree)
        if function.name not in replaced and any(_misses(change, function) for change in changes)
    } & set(left_out)
    size = -1
    while len(found) > size:
        size = len(found)
        found |= {
            name
            for name, definitions in left_out.items()
            if any(True for one in definitions for _ in global_uses(ast.Module([one.node], []), found))
        }
    return [name for name in left_out if name in found]


@dataclass(frozen=True)
class _Function:
    """A function with its full name; a class of a replacement is its methods."""

    name: str
    node: FunctionNode

    @property
    def called(self) -> str:
        """The name that its callers write; empty if they write another, such as that of a layer."""
        last = self.name.rpartition(".")[2]
        return "" if last == "forward" or last.startswith("__") else last

    @cached_property
    def calls(self) -> list[ast.Call]:
        return list(calls_in(self.node))

    @cached_property
    def signature(self) -> inspect.Signature:
        """Its parameters, without the instance of a method."""
        arguments = self.node.args
        parameters = parameters_of(arguments)
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in self.node.decorator_list)
        if "." in self.name and not static and (arguments.posonlyargs or arguments.args):
            del parameters[0]
        return inspect.Signature(parameters)

    @cached_property
    def result(self) -> set[tuple[str, ...]]:
        """For each return: how many values or which class, and the attributes that are set on it."""
        return {_made(node.value, self.node) for node in walk_ast(self.node) if isinstance(node, ast.Return)}

    def own_attributes(self, context: type[ast.expr_context]) -> set[str]:
        """The attributes of ``self`` that it reads (``ast.Load``), or sets (``ast.Store``)."""
        nodes = (node for node in walk_ast(self.node) if isinstance(getattr(node, "ctx", None), context))
        return set(map(own_attribute, nodes)) - {""}

    def takes(self, call: ast.Call) -> bool:
        """Whether a call can mean it, as far as its arguments say."""
        names = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        open_ended = len(names) < len(call.keywords) or any(isinstance(a, ast.Starred) for a in call.args)
        values = [a for a in call.args if not isinstance(a, ast.Starred)]
        try:
            (self.signature.bind_partial if open_ended else self.signature.bind)(*values, **names)
        except TypeError:
            return False
        return True


@dataclass(frozen=True)
class _Change:
    """A function that a patch replaces: by what, and what it was before and is now."""

    name: str
    new: _Function
    before: _Function | None
    now: _Function | None

    @property
    def added(self) -> set[str]:
        """The parameters that upstream's function does not have."""
        old = self.before.signature.parameters if self.before is not None else {}
        return set(self.new.signature.parameters) - set(old)

    @property
    def changes_result(self) -> bool:
        return self.before is not None and not self.new.result & self.before.result


def _changes(config: PatchConfig, patch: Patch, now: Document, base: Document) -> Iterator[_Change]:
    if patch.replacement is None or isinstance(patch.replacement, str):
        return
    where = f"config {config.name}"
    # The engine says what a name map does not match.
    node = read_snippet(patch.replacement, where=where, name_map=patch.name_map, tolerate=lambda _: None).node
    news = (
        [_Function(patch.target, node)]
        if not isinstance(node, ast.ClassDef)
        else [
            _Function(f"{patch.target}.{one.name.rpartition('.')[2]}", one.node) for one in _functions(node)
        ]
    )
    old, current = ({one.name: one for one in _functions(document.tree)} for document in (base, now))
    for new in news:
        yield _Change(new.name, new, old.get(new.name), current.get(new.name))


def _why(
    changes: Sequence[_Change],
    lost: Sequence[_Change],
    callers: Sequence[_Function],
    classes: Mapping[str, str],
) -> str:
    """Why these changes do not work beside the release's own code where others are lost; empty if they do."""
    for change in changes:
        for other in lost:
            if why := _calls(change, other) or _reads(change, other, classes):
                return why
            if (
                change.changes_result
                and other.now is not None
                and any(_calling(other.now, change.new.called))
            ):
                return f"it needs the patch of {other.name}, which takes its result"
        for caller in callers:
            if _misses(change, caller):
                return f"{caller.name} calls it with other arguments"
    return ""


def _misses(change: _Change, caller: _Function) -> bool:
    """Whether code calls what is replaced with arguments that the replacement does not take."""
    return not all(map(change.new.takes, _calling(caller, change.new.called)))


def _calls(change: _Change, other: _Change) -> str:
    """Whether a replacement calls what another patch, which is lost, would have changed."""
    needs = f"it needs the patch of {other.name}"
    for call in _calling(change.new, other.new.called):
        if other.now is None or not other.now.takes(call):
            return f"{needs}, which it calls with other arguments"
        if other.changes_result:
            return f"{needs}, whose result it takes"
    return ""


def _reads(change: _Change, other: _Change, classes: Mapping[str, str]) -> str:
    """Whether a replacement reads an attribute, or passes a parameter, that only another patch brings."""
    only = other.new.own_attributes(ast.Store)
    only -= other.before.own_attributes(ast.Store) if other.before is not None else set()
    if "." not in other.name or _owner(change.name) != _owner(other.name):
        only = set()
    elif other.now is None:
        only.add(other.name.rpartition(".")[2])
    owner = _owner(change.name)
    calls = [call for call in change.new.calls if _can_mean(call, owner, _owner(other.name), classes)]
    old = [call for one in (change.before, change.now) if one is not None for call in one.calls]
    passed = {keyword.arg for call in calls for keyword in call.keywords}
    passed -= {keyword.arg for call in old for keyword in call.keywords}
    names = (only & change.new.own_attributes(ast.Load)) | (
        (other.added & passed) if not other.new.called else set()
    )
    return f"it needs the patch of {other.name}, which brings {listed(sorted(names))}" if names else ""


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _calling(function: _Function, name: str) -> Iterator[ast.Call]:
    return (call for call in function.calls if name and last_name(call.func) == name)


def _can_mean(call: ast.Call, caller: str, owner: str, classes: Mapping[str, str]) -> bool:
    """Whether a call of a layer can be one of a class."""
    if not isinstance(call.func, ast.Attribute):
        return False
    attribute = call.func.attr
    if (known := classes.get(f"{caller}.{attribute}")) is not None:
        return known == owner
    elsewhere = {kind for name, kind in classes.items() if name.rpartition(".")[2] == attribute}
    return not elsewhere or owner in elsewhere


def _classes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The attributes of classes that hold a layer, and its class where the assignment names it."""
    for function in _functions(tree):
        for node in walk_ast(function.node):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                called = node.value.func
                class_ = called.value if isinstance(called, ast.Attribute) else called
                for target in node.targets:
                    if isinstance(class_, ast.Name) and (name := own_attribute(target)):
                        yield f"{_owner(function.name)}.{name}", class_.id


def _functions(tree: ast.AST, owner: str = "") -> Iterator[_Function]:
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield _Function(f"{owner}{node.name}", node)


def _made(value: ast.expr | None, function: FunctionNode) -> tuple[str, ...]:
    if isinstance(value, ast.Tuple):
        return (f"{len(value.elts)} values",)
    attributes: list[str] = []
    if isinstance(value, ast.Name):
        name = value.id
        for node in walk_ast(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id == name:
                        value = node.value
                    elif isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == name:
                        attributes.append(target.attr)
    class_name = last_name(value.func) if isinstance(value, ast.Call) else ""
    return (class_name if class_name[:1].isupper() else "a value", *sorted(attributes))
