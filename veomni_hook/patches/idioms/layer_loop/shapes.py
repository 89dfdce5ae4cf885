"""What happens to the positions of a tensor when its shape changes, or when it meets another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeAlias

from veomni_hook.patches.idioms.layer_loop.values import (
    BATCH,
    POSITIONS,
    Arguments,
    Dim,
    Items,
    Plain,
    Size,
    Tensor,
    Value,
    fresh,
    is_positional,
)
from veomni_hook.patches.site import Code, Missed

__all__ = [
    "FILLED",
    "SHAPED",
    "SHAPES",
    "Rule",
    "axis",
    "broadcast",
    "filled",
    "inserted",
    "made",
    "matmul",
    "met",
    "without",
]

#: Functions that make a tensor whose numbers are all the same, and methods that make one or repeat theirs.
FILLED = {"empty", "full", "ones", "zeros"}
SHAPED = {"expand", "new_empty", "new_full", "new_ones", "new_zeros"}
#: The result of a call.
Rule: TypeAlias = "Callable[[Arguments], Value]"


def made(dims: Sequence[Dim]) -> Value:
    """The tensor with these dimensions; plain if it has no positions."""
    return Tensor(tuple(dims)) if any(map(is_positional, dims)) else Plain()


def axis(tensor: Tensor, value: Value, *, extra: int = 0) -> int:
    """The index, from 0, of a dimension that code names by a number.

    Raises:
        Missed: the number is unknown, or there is no such dimension.
    """
    rank = len(tensor.dims) + extra
    number = value.value if isinstance(value, Plain) else None
    if not isinstance(number, int) or isinstance(number, bool) or not -rank <= number < rank:
        raise Missed("a dimension is not known")
    return number % rank


def inserted(tensor: Tensor, place: Value, dim: Dim) -> Tensor:
    """The tensor with one more dimension at a place that code names by a number.

    Raises:
        Missed: the place is unknown.
    """
    index = axis(tensor, place, extra=1)
    return Tensor((*tensor.dims[:index], dim, *tensor.dims[index:]))


def without(tensor: Tensor, value: Value, what: str) -> int:
    """The index of a dimension along which code may compute, as `axis` gives it.

    Raises:
        Missed: it has positions; ``what`` says what is computed.
    """
    index = axis(tensor, value)
    if is_positional(tensor.dims[index]):
        raise Missed(f"{what} along the positions", code=Code.MIXES_POSITIONS)
    return index


def size_of(value: Value) -> Dim | int | None:
    """A number in a shape: factors, -1, or None for any other number.

    Raises:
        Missed: it is not a number.
    """
    if isinstance(value, Size):
        return value.dim
    if isinstance(value, Plain):
        return () if value.value == 1 else -1 if value.value == -1 else None
    raise Missed("a shape is not known")


def reshaped(tensor: Tensor, sizes: Sequence[Dim | int | None]) -> Tensor:
    """The tensor after ``reshape``.

    Raises:
        Missed: it is not certain that positions stay what they are.
    """
    factors = [factor for dim in tensor.dims for factor in dim]
    last = max(number for number, factor in enumerate(factors) if factor == POSITIONS) + 1
    done = 0
    dims: list[Dim] = []
    rest_known = True
    for number, size in enumerate(sizes):
        later = [factor for size in sizes[number + 1 :] if isinstance(size, tuple) for factor in size]
        if done >= last:
            dims.append(size if isinstance(size, tuple) else fresh())
        elif isinstance(size, int):
            stop = next((at for at in range(done, last) if factors[at] in later), last)
            rest_known = stop == last
            dims.append(tuple(factors[done:stop]))
            done = stop
        elif isinstance(size, tuple) and tuple(factors[done : done + len(size)]) == size:
            dims.append(size)
            done += len(size)
        else:
            raise Missed("a reshape that may move positions", code=Code.MIXES_POSITIONS)
    said = [factor for size in sizes if isinstance(size, tuple) for factor in size]
    tail = factors[last:]
    if done < last or not (rest_known or not tail or said[-len(tail) :] == tail):
        raise Missed("a reshape that may move positions", code=Code.MIXES_POSITIONS)
    return Tensor(tuple(dims))


def expanded(tensor: Tensor, sizes: Sequence[Dim | int | None]) -> Tensor:
    """The tensor after ``expand``.

    Raises:
        Missed: a dimension with positions gets another size.
    """
    added = len(sizes) - len(tensor.dims)
    if added < 0:
        raise Missed("an expand with too few dimensions")
    dims: list[Dim] = []
    for number, size in enumerate(sizes):
        own = tensor.dims[number - added] if number >= added else ()
        if isinstance(size, int) or size == own:
            dims.append(own)
        elif own == ():
            dims.append(size if isinstance(size, tuple) else fresh())
        elif not is_positional(own) and not (isinstance(size, tuple) and is_positional(size)):
            dims.append(own)
        else:
            raise Missed("an expand that may repeat positions", code=Code.MIXES_POSITIONS)
    return Tensor(tuple(dims))


def broadcast(one: Value, other: Value) -> Value:
    """The result of an operation on the elements of two values.

    Raises:
        Missed: positions meet something that may not be positions.
    """
    if not isinstance(one, Tensor):
        one, other = other, one
    if not isinstance(one, Tensor):
        return Plain()
    if not isinstance(other, Tensor):
        if isinstance(other, Plain) and isinstance(other.value, int | float | str | type(None)):
            return one
        return Tensor(tuple(dim or fresh() for dim in one.dims))  # a parameter may be wider there
    # From the last dimension on: there, both begin.
    pairs = zip_longest(reversed(one.dims), reversed(other.dims), fillvalue=())
    return Tensor(tuple(met(*pair) for pair in pairs)[::-1])


def met(one: Dim, other: Dim) -> Dim:
    """The dimension of what code computes from two that stand for the same.

    Raises:
        Missed: positions meet something that may not be positions.
    """
    if other in (one, ()):
        return one
    if one == ():
        return other
    if is_positional(one) or is_positional(other):
        raise Missed("positions meet a dimension that may be another one", code=Code.MIXES_POSITIONS)
    return other if BATCH in other else one


def matmul(one: Value, other: Value) -> Value:
    """The product of two matrices, or of batches of them.

    Raises:
        Missed: it sums over positions, or has them in both of its dimensions.
    """
    left = one.dims if isinstance(one, Tensor) else None
    right = other.dims if isinstance(other, Tensor) else None
    if left is None and right is None:
        return Plain()
    if left is not None and is_positional(left[-1]):
        raise Missed("a matrix product sums over positions", code=Code.MIXES_POSITIONS)
    if right is not None and is_positional(right[max(len(right) - 2, 0)]):
        raise Missed("a matrix product sums over positions", code=Code.MIXES_POSITIONS)
    if left is None and right is not None:
        return made([*right[:-2], fresh(), right[-1]])
    if left is not None and right is None:
        return made([*left[:-1], fresh()])
    if left is None or right is None or len(left) < 2 or len(right) < 2:
        raise Missed("a matrix product with a vector")
    if is_positional(left[-2]) and is_positional(right[-1]):
        raise Missed("every position is multiplied with every other one", code=Code.MIXES_POSITIONS)
    batch = broadcast(Tensor(left[:-2]), Tensor(right[:-2]))
    dims = batch.dims if isinstance(batch, Tensor) else ()
    return made([*dims, left[-2], right[-1]])


def _sizes(arguments: Arguments) -> list[Dim | int | None]:
    return [size_of(number) for number in arguments.numbers(1)]


def filled(arguments: Arguments, start: int = 0) -> Value:
    """The tensor of the shape in the arguments from ``start`` on: all of its numbers are the same."""
    numbers = [value for value in arguments.numbers(start) if isinstance(value, Size | Plain)]
    return made([size if isinstance(size, tuple) else fresh() for size in map(size_of, numbers)])


def _transpose(arguments: Arguments) -> Value:
    dims = list(arguments.tensor.dims)
    one, other = (axis(arguments.tensor, arguments.get(place, f"dim{place - 1}")) for place in (1, 2))
    dims[one], dims[other] = dims[other], dims[one]
    return Tensor(tuple(dims))


def _flatten(arguments: Arguments) -> Value:
    dims = arguments.tensor.dims
    first = axis(arguments.tensor, arguments.get(1, "start_dim", default=Plain(0)))
    last = axis(arguments.tensor, arguments.get(2, "end_dim", default=Plain(-1)))
    joined = tuple(factor for dim in dims[first : last + 1] for factor in dim)
    return Tensor((*dims[:first], joined, *dims[last + 1 :]))


def _unflatten(arguments: Arguments) -> Value:
    index, dims = without(arguments.tensor, arguments.get(1, "dim"), "an unflatten"), arguments.tensor.dims
    sizes = arguments.get(2, "sizes")
    if not isinstance(sizes, Items):
        raise Missed("an unflatten into an unknown shape")
    return Tensor((*dims[:index], *(fresh() for _ in sizes.values), *dims[index + 1 :]))


def _size(arguments: Arguments) -> Value:
    sizes = tuple(Size(dim) for dim in arguments.tensor.dims)
    asked = len(arguments.given) + len(arguments.named) > 1
    return sizes[axis(arguments.tensor, arguments.get(1, "dim"))] if asked else Items(sizes)


def _dims_of_other(arguments: Arguments, what: str) -> tuple[Dim, ...]:
    other = arguments.get(1, "other")
    if not isinstance(other, Tensor):
        raise Missed(f"{what} to an unknown shape")
    return other.dims


def _repeat(arguments: Arguments) -> Value:
    counts, dims = arguments.numbers(1), arguments.tensor.dims
    if len(counts) != len(dims):
        raise Missed("a repetition in more dimensions")
    if any(count != Plain(1) and is_positional(dim) for dim, count in zip(dims, counts, strict=True)):
        raise Missed("a repetition along the positions", code=Code.MIXES_POSITIONS)
    return Tensor(tuple(d if count == Plain(1) else fresh() for d, count in zip(dims, counts, strict=True)))


#: What functions and methods do that change a shape.
SHAPES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape"), lambda arguments: reshaped(arguments.tensor, _sizes(arguments))),
    **dict.fromkeys(
        ("view_as", "reshape_as"),
        lambda arguments: reshaped(arguments.tensor, _dims_of_other(arguments, "a reshape")),
    ),
    "expand": lambda arguments: expanded(arguments.tensor, _sizes(arguments)),
    "expand_as": lambda arguments: expanded(arguments.tensor, _dims_of_other(arguments, "an expand")),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    "permute": lambda arguments: Tensor(
        tuple(arguments.tensor.dims[axis(arguments.tensor, number)] for number in arguments.numbers(1))
    ),
    "unsqueeze": lambda arguments: inserted(arguments.tensor, arguments.get(1, "dim"), ()),
    "flatten": _flatten,
    "unflatten": _unflatten,
    **dict.fromkeys(
        ("new_empty", "new_full", "new_ones", "new_zeros"), lambda arguments: filled(arguments, 1)
    ),
    "repeat": _repeat,
    "size": _size,
    "dim": lambda arguments: Plain(len(arguments.tensor.dims)),
    **dict.fromkeys(("view_as_real", "one_hot"), lambda arguments: Tensor((*arguments.tensor.dims, fresh()))),
}
