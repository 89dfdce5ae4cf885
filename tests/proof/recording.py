"""Runs upstream's text with stand-ins for everything that it imports and is given, and records what it does.

A stand-in (`Thing`) takes every operation; what comes out is another one, which knows what it was made of. The
classes of the text itself are real, and so are their methods, so a model's forward runs through its layers.
Nothing is built and no number is computed: a run says which object got where. Two runs of texts that do the
same have the same trace. Branches on stand-ins are drawn by a seed, alike for alike conditions.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dis
import hashlib
import importlib
import operator
import random
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import resolve_name
from types import FunctionType
from typing import Any

#: Modules that texts import for real: they only arrange what they are given.
_REAL = frozenset(("__future__", "abc", "collections", "contextlib", "enum", "functools", "itertools"))
#: How many elements a stand-in has, unless the code unpacks another number.
_ELEMENTS = 2
#: So often may a condition have one answer, and so many may a run ask: loops come to an end.
_ANSWERS, _QUESTIONS, _DEPTH = 8, 4000, 60
#: Decorators that change what a name is; all others only change how it runs.
_DECORATORS = re.compile(
    r"^(property|staticmethod|classmethod|(functools\.)?cached_property|\w+\.setter|veomni_.*)$", re.S
)


class Endless(Exception):
    """A run asks too much."""


@dataclass(frozen=True)
class Event:
    """A call of a stand-in, or of an object of a class of the text.

    ``key`` is what both sides of a comparison must have alike.
    """

    key: str
    callee: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any = None


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=9).hexdigest()


def key_of(value: Any) -> Any:
    """What a value is made of: alike for values that are made alike."""
    if isinstance(value, Thing | Part):
        return value._s_key
    if isinstance(value, dict):
        return ("dict", *((key_of(name), key_of(item)) for name, item in value.items()))
    if isinstance(value, tuple | list | set | frozenset):
        return (type(value).__name__, *map(key_of, value))
    if isinstance(value, slice):
        return ("slice", key_of(value.start), key_of(value.stop), key_of(value.step))
    if isinstance(value, types.MethodType):
        return ("method", key_of(value.__self__), value.__func__.__qualname__)
    if isinstance(value, FunctionType | type):
        return ("definition", value.__qualname__)
    if value is None or isinstance(value, bool | int | float | str | bytes | complex):
        return (type(value).__name__, value)
    return ("object", type(value).__name__)


class Thing:
    """Stands for any value.

    It knows its world, how it was made (an operation), of what (other values), and by which name.
    """

    __slots__ = ("__weakref__", "_s_cached", "_s_how", "_s_key", "_s_name", "_s_of", "_s_world")

    def __init__(self, world: World, how: str, of: tuple[Any, ...], name: Any = "") -> None:
        set_ = object.__setattr__
        set_(self, "_s_world", world)
        set_(self, "_s_how", how)
        set_(self, "_s_of", of)
        set_(self, "_s_name", name)
        set_(self, "_s_cached", {})
        set_(self, "_s_key", _digest(how, key_of(name), *map(key_of, of)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._s_part("attribute", name)

    def _s_part(self, how: str, name: Any) -> Any:
        at = (how, str(key_of(name)))
        if at not in self._s_cached:
            self._s_cached[at] = Thing(self._s_world, how, (self,), name)
        return self._s_cached[at]

    def __setattr__(self, name: str, value: Any) -> None:
        self._s_world.note("set", self, (name, value), {})
        self._s_cached["attribute", str(key_of(name))] = value

    def __getitem__(self, item: Any) -> Any:
        return self._s_part("item", item)

    def __setitem__(self, item: Any, value: Any) -> None:
        self._s_world.note("put", self, (item, value), {})
        self._s_cached["item", str(key_of(item))] = value

    def __delitem__(self, item: Any) -> None:
        self._s_world.note("del", self, (item,), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._s_world.called(self, args, kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[number] for number in range(_unpacked(sys._getframe(1)))])

    def __next__(self) -> Any:
        return self[0]

    def __len__(self) -> int:
        return _ELEMENTS

    def __index__(self) -> int:
        return _ELEMENTS

    __int__ = __index__

    def __float__(self) -> float:
        return float(_ELEMENTS)

    def __bool__(self) -> bool:
        return self._s_world.decide(self._s_key)

    def __contains__(self, item: Any) -> bool:
        return self._s_world.decide(_digest("in", self._s_key, key_of(item)))

    def __instancecheck__(self, instance: Any) -> bool:
        return self._s_world.decide(_digest("is", self._s_key, key_of(instance)))

    __subclasscheck__ = __instancecheck__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        known = any(isinstance(each, type) for each in bases)
        first = next(each for each in bases if isinstance(each, Thing))
        return (Part,) if self is first and not known else ()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> bool:
        return False

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{self._s_key}>"

    def __format__(self, _: str) -> str:
        return repr(self)


def _binary(name: str) -> Callable[..., Any]:
    def operation(self: Thing, *others: Any) -> Any:
        return Thing(self._s_world, name, (self, *others))

    return operation


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):
    setattr(Thing, f"__{_name}__", _binary(_name))
    setattr(Thing, f"__r{_name}__", _binary(f"r{_name}"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "invert", "abs"):
    setattr(Thing, f"__{_name}__", _binary(_name))


def _unpacked(frame: types.FrameType) -> int:
    """How many elements the code takes that iterates."""
    code = frame.f_code.co_code
    at = frame.f_lasti
    name, count = dis.opname[code[at]], code[at + 1]
    if name == "UNPACK_SEQUENCE":
        return count
    return (count & 0xFF) + 1 if name == "UNPACK_EX" else _ELEMENTS


class Kind(type):
    """The class of the text's classes; what they inherit from upstream's other modules is a stand-in."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or (world := vars(cls).get("_s_world") or Part._s_world) is None:
            raise AttributeError(name)
        return Thing(world, "attribute", (cls,), name)


class Part(metaclass=Kind):
    """In place of all classes that a text imports and inherits from."""

    _s_world: World | None = None

    def __init_subclass__(cls, **_: Any) -> None:
        """Take any keyword."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        made = object.__new__(cls)
        assert Part._s_world is not None
        vars(made)["_s_key"] = _digest("part", cls.__name__, Part._s_world.numbered(cls.__name__))
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], Thing):
            self.config = args[0]
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        assert Part._s_world is not None
        Part._s_world.asked_for.append((self, name))
        return vars(self).setdefault(name, Thing(Part._s_world, "attribute", (self,), name))

    def __getitem__(self, item: Any) -> Any:
        assert Part._s_world is not None
        return Thing(Part._s_world, "item", (self,), item)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for a forward that is written elsewhere."""
        assert Part._s_world is not None
        return Part._s_world.called(Thing(Part._s_world, "attribute", (self,), "forward"), args, kwargs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        world = Part._s_world
        assert world is not None
        world.note("call", self, args, kwargs)
        if world.depth >= _DEPTH:
            raise Endless
        world.depth += 1
        try:
            return self.forward(*args, **kwargs)
        finally:
            world.depth -= 1


class Parts(list[Any]):
    """A list of modules, by number or by name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        assert Part._s_world is not None
        return Thing(Part._s_world, "attribute", (list(self),), name)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return Parts(super().__getitem__(item))
        try:
            return super().__getitem__(operator.index(item) % max(len(self), 1))
        except (IndexError, TypeError) as error:
            assert Part._s_world is not None
            if isinstance(error, IndexError):
                raise
            return Thing(Part._s_world, "item", (list(self),), item)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for each in self:
            args, kwargs = (each(*args, **kwargs),), {}
        return args[0]


@dataclass
class World:
    """One run: its draw of branches, and what happened.

    Attributes:
        seed: of the branches; 0: every condition is true; 1: none is.
        events: the calls, in order.
        asked_for: attributes of objects of the text that its own code did not set.
        inserted: what helpers of ours were given, in order.
    """

    seed: int
    events: list[Event] = field(default_factory=list)
    asked_for: list[tuple[Any, str]] = field(default_factory=list)
    inserted: list[Any] = field(default_factory=list)
    depth: int = 0
    defining: bool = False
    _asked: Counter[str] = field(default_factory=Counter)
    _numbers: Counter[str] = field(default_factory=Counter)
    _roots: dict[str, Thing] = field(default_factory=dict)

    def defined(self) -> None:
        """Begin the run itself: what definitions asked does not count."""
        self.defining = False
        self._asked.clear()

    def numbered(self, name: str) -> int:
        """How many there were before of a name."""
        self._numbers[name] += 1
        return self._numbers[name]

    def decide(self, key: str) -> bool:
        """The answer to a condition: the same for the same one, except in loops without end."""
        self._asked[key] += 1
        if self._asked.total() > _QUESTIONS:
            raise Endless
        if self.defining:
            return True
        first = bool(1 - self.seed) if self.seed < 2 else random.Random(f"{self.seed} {key}").random() < 0.6
        return first if self._asked[key] <= _ANSWERS else not first

    def note(
        self, how: str, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any = None
    ) -> None:
        """Write an event down."""
        if not self.defining:
            key = _digest(how, key_of(callee), *map(key_of, args), key_of(dict(sorted(kwargs.items()))))
            self.events.append(Event(key, callee, args, dict(kwargs), result))

    def called(self, callee: Thing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call of a stand-in."""
        name = callee._s_name if callee._s_how == "attribute" else ""
        if name == "keys":  # nothing to hand on with **
            return []
        if name == "get" and args:  # a look-up, whose result may be absent
            found = callee._s_of[0][args[0]]
            return found if self.decide(_digest("there", key_of(found))) else None
        if name == "ModuleList":
            return Parts(args[0]) if args else Parts()
        if name == "Sequential":
            return Parts(args)
        result = Thing(self, "call", (callee, *args, *kwargs.values()), tuple(kwargs))
        self.note("call", callee, args, kwargs, result)
        return result

    def module(self, name: str) -> Any:
        """What stands for an imported module."""
        first, *others = name.split(".")
        module: Any = self._roots.setdefault(first, Thing(self, "import", (), first))
        for each in others:
            module = getattr(module, each)
        return module

    def given(self, name: str) -> Thing:
        """A stand-in for an argument."""
        return Thing(self, "given", (), name)

    def execute(self, tree: ast.Module, name: str, also: Mapping[str, Any]) -> dict[str, Any]:
        """The names that a module's text defines, with ``also``."""
        package = name.rpartition(".")[0]

        def imported(what: str, scope: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
            full = resolve_name("." * level + what, package) if level else what
            if full.partition(".")[0] in _REAL:
                return importlib.__import__(what, scope, local, names, level)
            return self.module(full if names or level else full.partition(".")[0])

        scope: dict[str, Any] = {
            "__name__": name,
            "__package__": package,
            "__builtins__": {**vars(builtins), "__import__": imported, "_s_table": _Table},
            **also,
        }
        Part._s_world = self
        self.defining = True
        try:
            exec(_compiled(tree, name), scope)
        finally:
            self.defining = False
        return scope | dict(also)


_CODE: dict[int, tuple[ast.Module, Any]] = {}


def _compiled(tree: ast.Module, name: str) -> Any:
    if id(tree) not in _CODE:
        if len(_CODE) > 8:
            _CODE.clear()
        plain = ast.fix_missing_locations(_Plain().visit(copy.deepcopy(tree)))
        _CODE[id(tree)] = tree, compile(plain, name, "exec", dont_inherit=True)
    return _CODE[id(tree)][1]


class _Plain(ast.NodeTransformer):
    """Leaves decorators out, and makes dictionaries take stand-ins as keys."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [each for each in node.decorator_list if _DECORATORS.match(ast.unparse(each))]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        return ast.Call(ast.Name("_s_table", ast.Load()), [self.generic_visit(node)], [])


class _Table(dict[Any, Any]):
    """A dictionary that has a value for a stand-in: always the same one for the same."""

    def __missing__(self, key: Any) -> Any:
        if not isinstance(key, Thing) or not self:
            raise KeyError(key)
        return list(self.values())[int(key._s_key, 16) % len(self)]
