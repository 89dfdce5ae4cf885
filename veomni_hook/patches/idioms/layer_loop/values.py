"""What the evaluation of layer code knows of a value: which of a tensor's dimensions are positions.

A dimension is a tuple of factors: ``B`` (batch), ``S`` (positions), or a name for any other size; ``()`` is a
dimension of size 1, ``("B", "S")`` a batch and its positions in one dimension.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.site import Missed

__all__ = [
    "BATCH",
    "EMPTY",
    "NOTHING",
    "PLAIN",
    "POSITIONS",
    "Attention",
    "Dim",
    "Items",
    "Many",
    "Maybe",
    "Method",
    "Module",
    "Operation",
    "Own",
    "Plain",
    "Size",
    "Tensor",
    "Unknown",
    "Value",
    "Whole",
    "is_positional",
    "of_all",
    "read_from",
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


@dataclass(frozen=True)
class Size:
    """The size of a dimension of a `Tensor`."""

    dim: Dim


@dataclass(frozen=True)
class Whole:
    """A value for all positions, such as a mask: it may be passed on, but not computed with.

    Of keyword arguments, ``held`` are those that are parts of the positions, by name.
    """

    name: str
    held: tuple[tuple[str, Value], ...] = ()


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
class Own:
    """An instance of a class of the file, while its own methods run."""

    owner: str


@dataclass(frozen=True)
class Module:
    """A module of torch or of this file, by its class's full name; several if settings choose between them.

    ``made`` is the call that creates it, or None.
    """

    names: tuple[str, ...]
    made: ast.expr | None = None


@dataclass(frozen=True)
class Method:
    """A function of the file, bound to ``owner`` if it is a method."""

    node: FunctionNode
    owner: Own | None = None


@dataclass(frozen=True)
class Operation:
    """A method of a value, before it is called."""

    value: Value
    name: str


@dataclass(frozen=True)
class Attention:
    """The function of the user's attention implementation."""


@dataclass(frozen=True)
class Unknown:
    """A value that must not be used; ``reason`` says what it is."""

    reason: str


#: What an empty list or dictionary holds.
EMPTY = Unknown("an item of an empty collection")

Value: TypeAlias = (
    "Tensor | Plain | Size | Whole | Items | Many | Maybe | Own | Module | Method | Operation "
    "| Attention | Unknown"
)


def is_positional(dim: Dim) -> bool:
    """Whether a dimension has positions in it."""
    return POSITIONS in dim


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
                yield from of_all(each for _, each in value.held)


def read_from(value: Whole, key: Value, node: ast.AST) -> Whole:
    """What code reads by a key of a value for all positions.

    Raises:
        Missed: it may be a part of the positions.
    """
    held = dict(value.held)
    if held and not (isinstance(key, Plain) and isinstance(key.value, str) and key.value not in held):
        raise Missed(f"it reads a part of the positions from {value.name}", node)
    return Whole(value.name)
