"""Renamed parameters between two releases, and code that differs by names only."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import TypeAlias

from veomni_hook.patches.code.comparison import serialise, significant_fields
from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.renames import Rename
from veomni_hook.patches.code.scope import local_names, parameter_names
from veomni_hook.patches.code.tree import FUNCTIONS, walk_ast
from veomni_hook.tools.lock.records import Body
from veomni_hook.tools.lock.signatures import own_functions, parameters_of

__all__ = ["Pair", "Renamed", "Renames"]

#: A definition in both releases: the lock's module and name, what it was, and what it is.
Pair: TypeAlias = tuple[str, str, Body, Body]
#: What a name stands for, the name, and the new name.
_Names: TypeAlias = frozenset[tuple[str, str, str]]

_WORD = re.compile(r"\w+")
# The fields that name something, and what: one name may be used for several things.
_NAMING = {
    (ast.Name, "id"): "name",
    (ast.arg, "arg"): "name",
    (ast.keyword, "arg"): "keyword",
    (ast.Attribute, "attr"): "attribute",
    (ast.Constant, "value"): "text",
}


@dataclass(frozen=True, order=True, slots=True)
class Renamed:
    """A parameter that has another name now.

    Attributes:
        old: its name in the lock.
        new: its name now.
        declared: whether upstream says so; otherwise place, annotation, default and uses are the same.
        until: the release up to which the old keyword is taken; empty if that is not known.
    """

    old: str
    new: str
    declared: bool
    until: str = ""

    def remark(self, release: str) -> str:
        """What becomes of the old keyword in a release, as the end of a sentence."""
        if not self.declared:
            return "upstream does not take the old keyword"
        ends = _numbers(self.until) > _numbers(release)
        return "the old keyword still works" + f" until {self.until.removesuffix('.0')}" * ends


def _numbers(release: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", release))]


class Renames:
    """The parameters that were renamed between two releases.

    Args:
        pairs: the definitions that both have.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._changed = [pair for pair in pairs if pair[2].fingerprint != pair[3].fingerprint]
        functions = [function for _, _, *bodies in self._changed for function in _functions(*bodies)]
        self._declared = {
            (old, rename.new) for function in functions for old, rename in function.renames.items()
        }
        candidates = [(function, names) for function in functions if (names := function.alike())]
        self._likely = {pair for _, names in candidates for pair in names}
        self._likely = {
            pair
            for function, names in candidates
            if self._know(_differing(function.old, function.new))
            for pair in names
        }
        self._names = dict(sorted(self._likely)) | dict(sorted(self._declared))

    def are_all(self, before: Body | None, after: Body | None) -> bool:
        """Whether a definition is the same code but for renamed parameters, and names of its own."""
        if before is None or after is None or before.fingerprint == after.fingerprint:
            return before is not None and after is not None
        old, new = _parsed(before.text), _parsed(after.text)
        if old is None or new is None:
            return False
        return self._know(_differing(old, new, after.renames))

    def of(self, before: Body, after: Body) -> dict[str, list[Renamed]]:
        """The renamed parameters of a function (under an empty name), or of each method of a class."""
        return {function.name: [*self._of(function)] for function in _functions(before, after)}

    def places(self) -> dict[Renamed, list[tuple[str, str]]]:
        """The functions of each renamed parameter, as pairs of a module and a name."""
        places: dict[Renamed, list[tuple[str, str]]] = defaultdict(list)
        for module, name, *bodies in self._changed:
            for function in _functions(*bodies):
                for renamed in self._of(function):
                    places[renamed].append((module, f"{name}.{function.name}".rstrip(".")))
        return places

    def lines(self, before: Body, after: Body) -> tuple[str, ...]:
        """The lines that only one form of a definition has, beside renamed parameters and decorators."""
        old = Counter(_WORD.sub(lambda word: self._names.get(word[0], word[0]), line) for line in before.text)
        new = Counter(after.text)
        lost, added = (
            sorted(line.strip() for line in counter.elements()) for counter in (old - new, new - old)
        )
        return tuple(
            f"{sign}{line}"
            for sign, lines in (("-", lost), ("+", added))
            for line in lines
            if line[:1] not in ("@", "")
        )

    def _know(self, names: _Names | None) -> bool:
        """Whether names differ as parameters do; attributes and texts only where a rename is declared."""
        return names is not None and all(
            pair in self._declared or (kind in ("name", "keyword") and pair in self._likely)
            for kind, pair in ((kind, (old, new)) for kind, old, new in names)
        )

    def _of(self, function: _Function) -> Iterator[Renamed]:
        for old, rename in function.said().items():
            yield Renamed(old, rename.new, True, rename.until)
        for old, new in sorted(function.alike() & self._likely):
            yield Renamed(old, new, False)


@dataclass(frozen=True)
class _Function:
    """A function in both releases; ``name`` is that of a method in a class, else empty."""

    name: str
    old: FunctionNode
    new: FunctionNode
    renames: Mapping[str, Rename]

    def said(self) -> dict[str, Rename]:
        """What upstream says of parameters that only one of the two has."""
        return {old: rename for old, rename in self.renames.items() if self._is_change(old, rename.new)}

    def alike(self) -> set[tuple[str, str]]:
        """Other parameters that differ by their names only."""
        both = zip(_parameters(self.old), _parameters(self.new), strict=False)
        return {
            (old, new)
            for (old, *before), (new, *after) in both
            if before == after and self._is_change(old, new) and old not in self.said()
        }

    def _is_change(self, old: str, new: str) -> bool:
        gone, fresh = parameter_names(self.old), parameter_names(self.new)
        return old in gone - fresh and new in fresh - gone


def _functions(before: Body, after: Body) -> Iterator[_Function]:
    old, new = (dict(own_functions(_parsed(body.text))) for body in (before, after))
    for name in old:
        if name in new:
            yield _Function(name, old[name], new[name], after.renames.get(name, {}))


@cache
def _parsed(text: tuple[str, ...]) -> ast.stmt | None:
    try:
        return ast.parse("\n".join(text)).body[0]
    except SyntaxError:  # another release of Python wrote the lock
        return None


def _parameters(function: FunctionNode) -> Iterator[tuple[str, str, str, str]]:
    """The name of each parameter but `*` and `**`, and then its kind, annotation and default."""
    for one in parameters_of(function.args):
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            yield one.name, one.kind.name, serialise(one.annotation), serialise(one.default)


def _differing(
    old: ast.AST, new: ast.AST, renames: Mapping[str, Mapping[str, Rename]] | None = None
) -> _Names | None:
    """The pairs of names by which two definitions differ; None if they differ by more.

    A name must be another one throughout. Names that are local to both do not count, nor do the name and the
    decorators of a definition, and of a method the decorators that declare its ``renames``.
    """
    if isinstance(old, ast.ClassDef) and isinstance(new, ast.ClassDef):
        return _in_classes(old, new, renames or {})
    names: dict[tuple[str, str], str] = {}
    before, after = (
        [value for name, value in significant_fields(tree) if name not in ("name", "decorator_list")]
        for tree in (old, new)
    )
    if type(old) is not type(new) or not _same(before, after, names):
        return None
    turned = [(kind, now) for (kind, _), now in names.items() if kind != "keyword"]
    if len({*turned}) < len(turned):
        return None  # two names became one; as keywords of two calls they may
    one, other = (
        local_names(tree) - parameter_names(tree) if isinstance(tree, FUNCTIONS) else frozenset()
        for tree in (old, new)
    )
    return frozenset(
        (kind, was, now)
        for (kind, was), now in names.items()
        if was != now and not (kind == "name" and was in one and now in other)
    )


def _in_classes(
    old: ast.ClassDef, new: ast.ClassDef, renames: Mapping[str, Mapping[str, Rename]]
) -> _Names | None:
    before, after = [*own_functions(old)], [*own_functions(new)]
    rest = _differing(_without_methods(old), _without_methods(new))
    if [name for name, _ in before] != [name for name, _ in after] or rest is None:
        return None
    names = {*rest}
    for (name, one), (_, other) in zip(before, after, strict=True):
        differs = _differing(one, other)
        if differs is None or _decorators(one, {}) != _decorators(other, renames.get(name, {})):
            return None
        names |= differs
    return frozenset(names)


def _without_methods(owner: ast.ClassDef) -> ast.Module:
    methods = [method for _, method in own_functions(owner)]
    bases = [ast.Expr(base) for base in owner.bases]
    keywords = [ast.Expr(keyword.value) for keyword in owner.keywords]
    return ast.Module(
        [*bases, *keywords, *(statement for statement in owner.body if statement not in methods)], []
    )


def _decorators(function: FunctionNode, renames: Mapping[str, Rename]) -> list[str]:
    kept = []
    for decorator in function.decorator_list:
        said = {node.value for node in walk_ast(decorator) if isinstance(node, ast.Constant)}
        if not any({old, rename.new} <= said for old, rename in renames.items()):
            kept.append(serialise(decorator))
    return kept


def _same(one: object, other: object, names: dict[tuple[str, str], str]) -> bool:
    """Whether two trees are the same but for ``names``, which gets what stands for what."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other, repeat(names)))
    if not (isinstance(one, ast.AST) and isinstance(other, ast.AST)):
        return serialise(one) == serialise(other)
    fields, others = dict(significant_fields(one)), dict(significant_fields(other))
    if type(one) is not type(other) or fields.keys() != others.keys():
        return False
    for name, value in fields.items():
        kind = _NAMING.get((type(one), name))
        if kind and isinstance(value, str) and isinstance(others[name], str):
            if names.setdefault((kind, value), others[name]) != others[name]:
                return False
        elif not _same(value, others[name], names):
            return False
    return True
