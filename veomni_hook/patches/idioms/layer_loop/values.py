"""What is known of a value of layer code: which of a tensor's dimensions are positions.

A dimension is a tuple of factors: ``B`` (batch), ``S`` (positions), or a name for any other size; ``()`` is a
dimension of size 1, ``("B", "S")`` a batch and its positions in one dimension.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.site import Code, Missed

__all__ = [
    "ATTENTION",
    "BATCH",
    "EMPTY",
    "END",
    "KEYS",
    "NOTHING",
    "PLACES",
    "PLAIN",
    "POSITIONS",
    "SLICE",
    "START",
    "Arguments",
    "Dim",
    "Items",
    "Many",
    "Maybe",
    "Method",
    "Module",
    "NotARow",
    "Operation",
    "Plain",
    "Size",
    "Tensor",
    "Unknown",
    "Value",
    "Whole",
    "all_joined",
    "bare",
    "classes_in",
    "depends",
    "fresh",
    "holds_tensor",
    "is_positional",
    "is_shaped",
    "joined",
    "of_all",
    "read_from",
    "shaped",
    "tensor_like",
    "used",
]

BATCH, POSITIONS = "B", "S"

Dim: TypeAlias = "tuple[str, ...]"


@dataclass(frozen=True)
class Tensor:
    """A tensor that holds a part of the positions."""

    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class Plain:
    """A value without positions: a parameter, a number, a setting; ``value`` is the constant, if known."""

    value: object = ...


#: A value without positions, of which nothing else is known.
PLAIN = Plain()
NOTHING = Plain(None)
#: The value of ``slice(...)``.
SLICE = Plain(slice)


@dataclass(frozen=True)
class Size:
    """The size of a dimension of a `Tensor`."""

    dim: Dim


@dataclass(frozen=True)
class Whole:
    """A value for all positions, such as a mask: it may be passed on, but not computed with.

    Of keyword arguments, ``held`` are those that are parts of the positions, by name. ``rows`` are the names
    that it may have in the forward of a tower, where it may have a row for each row of the hidden states.
    """

    name: str
    held: tuple[tuple[str, Value], ...] = ()
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Items:
    """A tuple or list."""

    values: tuple[Value, ...]


@dataclass(frozen=True)
class Many:
    """A list or dictionary of unknown length whose values are all alike."""

    value: Value


@dataclass(frozen=True)
class Maybe:
    """A value or None."""

    value: Value


@dataclass(frozen=True)
class Module:
    """A module of torch or of this file, by its class's full name; several if settings choose between them.

    While ``__init__`` is followed, a class that is no ``instance`` yet.
    """

    names: tuple[str, ...]
    instance: bool = True


@dataclass(frozen=True)
class Method:
    """A function of the file; a method is bound to ``owner``, and its class ``home`` defines it."""

    node: FunctionNode
    owner: Module | None = None
    home: ast.ClassDef | None = None


@dataclass(frozen=True)
class Operation:
    """A method of a value, before it is called."""

    value: Value
    name: str


@dataclass(frozen=True)
class Unknown:
    """A value that must not be used; ``reason`` says what it is."""

    reason: str


#: The function of the user's attention implementation.
ATTENTION = Module((":attention",))
#: A cache that answers with the keys of all positions, which are the same in every process.
KEYS = Module((":keys",))
#: The number of positions up to the last one of this process; the first one; and numbers from 0 for its own.
END, START, PLACES = (
    Unknown(f"the number of a position: {place}") for place in ("the last", "the first", "from 0 on")
)
#: What an empty list or dictionary holds.
EMPTY = Unknown("an item of an empty collection")

Value: TypeAlias = (
    "Tensor | Plain | Size | Whole | Items | Many | Maybe | Module | Method | Operation | Unknown"
)


_numbers = count()


def fresh() -> Dim:
    """A dimension without positions whose size nothing else has."""
    return (f"n{next(_numbers)}",)


def is_positional(dim: Dim) -> bool:
    """Whether a dimension has positions in it."""
    return POSITIONS in dim


_LETTERS: dict[str, Dim] = {"B": (BATCH,), "S": (POSITIONS,), "1": ()}


def shaped(letters: str) -> Tensor:
    """A tensor by its dimensions: B, S, 1, and ``.`` for any other size, without positions."""
    return Tensor(tuple(_LETTERS[letter] if letter in _LETTERS else fresh() for letter in letters.split()))


def is_shaped(value: Value | None, *shapes: str) -> bool:
    """Whether a value is a tensor with the dimensions of a text that `shaped` takes."""
    dims = value.dims if isinstance(value, Tensor) else ()
    for letters in map(str.split, shapes):
        pairs = zip(dims, letters, strict=False)
        if all(
            dim == _LETTERS[letter] if letter in _LETTERS else not is_positional(dim) for dim, letter in pairs
        ):
            if len(letters) == len(dims):
                return True
    return False


def bare(value: Value) -> Value:
    """A value that code uses, so it is not None."""
    return value.value if isinstance(value, Maybe) else value


def of_all(values: Iterable[Value]) -> Iterable[Value]:
    """Every value, with those inside of tuples, lists, dictionaries and keyword arguments."""
    for value in values:
        if isinstance(value, Items):
            yield from of_all(value.values)
        elif isinstance(value, Many | Maybe):
            yield from of_all([value.value])
        else:
            yield value
            if isinstance(value, Whole):
                yield from of_all(part for _, part in value.held)


def classes_in(values: Iterable[Value]) -> list[str]:
    """The names of the classes of all modules in values."""
    return [name for value in of_all(values) if isinstance(value, Module) for name in value.names]


def holds_tensor(value: Value) -> bool:
    """Whether a value is or holds a part of the positions."""
    return any(isinstance(part, Tensor) for part in of_all([value]))


def depends(value: Value | None) -> bool:
    """Whether a value is or holds something else on a part of the positions than on all of them."""
    return value is not None and any(
        isinstance(part, Tensor | Unknown) or (isinstance(part, Size) and is_positional(part.dim))
        for part in of_all([value])
    )


def read_from(value: Whole, key: Value) -> Value:
    """What code reads by a key of a value for all positions.

    Raises:
        Missed: it may be a part of the positions.
    """
    parts = dict(value.held)
    name = key.value if isinstance(key, Plain) else None
    if parts and not isinstance(name, str):
        raise Missed(f"it reads a part of the positions from {value.name}", code=Code.MIXES_POSITIONS)
    return parts[name] if name in parts else Whole(value.name, rows=value.rows)


def joined(one: Value, other: Value) -> Value:
    """What is known of a value that is one or the other."""
    if other in (one, EMPTY):
        return one
    if one == EMPTY:
        return other
    if NOTHING in (one, other):
        rest = other if one == NOTHING else one
        return rest if isinstance(rest, Maybe | Whole) else Maybe(rest)
    if isinstance(one, Maybe) or isinstance(other, Maybe):
        return joined(NOTHING, joined(bare(one), bare(other)))
    return _alike(one, other) or _mixed(one, other) or Unknown("a value that differs between branches")


def all_joined(values: Iterable[Value]) -> Value:
    """What several values have in common."""
    result: Value = EMPTY
    for value in values:
        result = joined(result, value)
    return result


def _alike(one: Value, other: Value) -> Value | None:
    """Two values of one kind."""
    if isinstance(one, Tensor) and isinstance(other, Tensor) and len(one.dims) == len(other.dims):
        pairs = list(zip(one.dims, other.dims, strict=True))
        if all(a == b or not (is_positional(a) or is_positional(b)) for a, b in pairs):
            return Tensor(tuple(a if a == b else fresh() for a, b in pairs))
    if isinstance(one, Items) and isinstance(other, Items) and len(one.values) == len(other.values):
        return Items(tuple(joined(a, b) for a, b in zip(one.values, other.values, strict=True)))
    if isinstance(one, Many) and isinstance(other, Many):
        return Many(joined(one.value, other.value))
    if isinstance(one, Module) and isinstance(other, Module):
        return Module(tuple(dict.fromkeys((*one.names, *other.names))), one.instance)
    return None


def _mixed(one: Value, other: Value) -> Value | None:
    """Two values of which one may be a number, or a mask."""
    if isinstance(one, Plain | Size) and isinstance(other, Plain | Size):
        return None if depends(one) or depends(other) else PLAIN
    if isinstance(one, Whole) and isinstance(other, Whole):
        names = dict.fromkeys((*one.name.split(" or "), *other.name.split(" or ")))
        rows = dict.fromkeys((*one.rows, *other.rows)) if one.rows and other.rows else ()
        return Whole(" or ".join(names), rows=tuple(rows)) if one.held == other.held else None
    whole, number = (one, other) if isinstance(one, Whole) else (other, one)
    return whole if isinstance(whole, Whole) and isinstance(number, Plain) else None


class NotARow(Missed):
    """Layers compute with something that is not known to have a row for each row of the hidden states.

    Args:
        name: what the tower's forward calls it.
        parts: into how many values they unpack it; 0 if they do not.
    """

    def __init__(self, name: str, parts: int) -> None:
        super().__init__(f"it computes with {name}, which holds all rows")
        self.name, self.parts = name, parts


def used(value: Value, parts: int = 0) -> Value:
    """A value that code uses, or unpacks into ``parts``, so it is not None.

    Raises:
        NotARow: it is something of a tower's forward, for all rows.
    """
    value = bare(value)
    if isinstance(value, Whole) and len(value.rows) == 1:
        raise NotARow(value.rows[0], parts)
    return value


def tensor_like(value: Value) -> Value:
    """A value that code computes with.

    Raises:
        Missed: it holds all positions, or it is not known.
    """
    value = used(value)
    if isinstance(value, Whole):
        raise Missed(f"it computes with {value.name}, which holds all positions", code=Code.MIXES_POSITIONS)
    if isinstance(value, Unknown):
        raise Missed(f"it uses {value.reason}")
    if isinstance(value, Size):
        if is_positional(value.dim):
            raise Missed("it computes with the number of positions", code=Code.MIXES_POSITIONS)
        return PLAIN
    return value


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: a method's receiver is the first; ``bag`` is all positions after ``**``."""

    given: tuple[Value, ...] = ()
    named: Mapping[str, Value] = field(default_factory=dict)
    bag: Whole | None = None

    @property
    def every(self) -> list[Value]:
        """All values, with those inside of tuples, lists and dictionaries."""
        return list(of_all([*self.given, *self.named.values()]))

    @property
    def first(self) -> Value:
        """The first argument, by its place or its name."""
        return next(iter((*self.given, *self.named.values())), PLAIN)

    def get(self, index: int, *names: str, default: Value = NOTHING) -> Value:
        """An argument by its place or by one of its names."""
        for name in names:
            if name in self.named:
                return self.named[name]
        return self.given[index] if index < len(self.given) else default

    @property
    def tensor(self) -> Tensor:
        """The first argument.

        Raises:
            Missed: it is not a tensor with positions.
        """
        first = self.get(0, "input", "x")
        if not isinstance(first, Tensor):
            raise Missed("a value whose positions are not known")
        return first

    def numbers(self, start: int) -> list[Value]:
        """The numbers of a shape, given one by one or as a tuple."""
        rest = self.given[start:] or tuple(self.named.values())
        if rest and isinstance(rest[0], Items):
            return list(rest[0].values)
        return list(rest)
