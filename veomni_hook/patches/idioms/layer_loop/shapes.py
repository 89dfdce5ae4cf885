"""What happens to the positions of a tensor when its shape changes, or when it meets another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

__all__ = ["SHAPES", "Rule", "axis", "broadcast", "made", "matmul", "without"]

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
        later = [factor for each in sizes[number + 1 :] if isinstance(each, tuple) for factor in each]
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
    rank = max(len(one.dims), len(other.dims))
    pairs = zip(_padded(one.dims, rank), _padded(other.dims, rank), strict=True)
    return Tensor(tuple(_met(*pair) for pair in pairs))


def _padded(dims: Sequence[Dim], rank: int) -> list[Dim]:
    return [()] * (rank - len(dims)) + list(dims)


def _met(one: Dim, other: Dim) -> Dim:
    if other in (one, ()):
        return one
    if one == ():
        return other
    if is_positional(one) or is_positional(other) or BATCH in (*one, *other):
        raise Missed("positions meet a dimension that may be another one", code=Code.MIXES_POSITIONS)
    return one


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


def _reshape(given: Arguments) -> Value:
    sizes = [size_of(each) for each in given.numbers(1)]
    return reshaped(given.tensor, sizes)


def _expand(given: Arguments) -> Value:
    return expanded(given.tensor, [size_of(each) for each in given.numbers(1)])


def _transpose(given: Arguments) -> Value:
    tensor = given.tensor
    dims = list(tensor.dims)
    one, other = axis(tensor, given.get(1, "dim0")), axis(tensor, given.get(2, "dim1"))
    dims[one], dims[other] = dims[other], dims[one]
    return Tensor(tuple(dims))


def _permute(given: Arguments) -> Value:
    order = [axis(given.tensor, each) for each in given.numbers(1)]
    return Tensor(tuple(given.tensor.dims[number] for number in order))


def _unsqueeze(given: Arguments) -> Value:
    dims = list(given.tensor.dims)
    dims.insert(axis(given.tensor, given.get(1, "dim"), extra=1), ())
    return Tensor(tuple(dims))


def _flatten(given: Arguments) -> Value:
    dims = list(given.tensor.dims)
    first = axis(given.tensor, given.get(1, "start_dim", default=Plain(0)))
    last = axis(given.tensor, given.get(2, "end_dim", default=Plain(-1)))
    joined = tuple(factor for dim in dims[first : last + 1] for factor in dim)
    return Tensor((*dims[:first], joined, *dims[last + 1 :]))


def _unflatten(given: Arguments) -> Value:
    index = without(given.tensor, given.get(1, "dim"), "an unflatten")
    sizes = given.get(2, "sizes")
    number = len(sizes.values) if isinstance(sizes, Items) else 0
    if not number:
        raise Missed("an unflatten into an unknown shape")
    dims = given.tensor.dims
    return Tensor((*dims[:index], *(fresh() for _ in range(number)), *dims[index + 1 :]))


def _size(given: Arguments) -> Value:
    if len(given.given) + len(given.named) < 2:
        return Items(tuple(Size(dim) for dim in given.tensor.dims))
    return Size(given.tensor.dims[axis(given.tensor, given.get(1, "dim"))])


def _new(given: Arguments) -> Value:
    sizes = [size_of(each) for each in given.numbers(1)]
    return made([size if isinstance(size, tuple) else fresh() for size in sizes])


def _view_as(given: Arguments) -> Value:
    other = given.get(1, "other")
    if not isinstance(other, Tensor):
        raise Missed("a reshape to an unknown shape")
    return reshaped(given.tensor, list(other.dims))


def _repeat(given: Arguments) -> Value:
    counts = given.numbers(1)
    if len(counts) != len(given.tensor.dims):
        raise Missed("a repetition in more dimensions")
    dims: list[Dim] = []
    for dim, count in zip(given.tensor.dims, counts, strict=True):
        if count != Plain(1) and is_positional(dim):
            raise Missed("a repetition along the positions", code=Code.MIXES_POSITIONS)
        dims.append(dim if count == Plain(1) else fresh())
    return Tensor(tuple(dims))


def _rank(given: Arguments) -> Value:
    return Plain(len(given.tensor.dims))


def _as_complex(given: Arguments) -> Value:
    without(given.tensor, Plain(-1), "complex numbers")
    return made(given.tensor.dims[:-1])


def _as_real(given: Arguments) -> Value:
    return Tensor((*given.tensor.dims, fresh()))


#: What functions and methods do that change a shape.
SHAPES: dict[str, Rule] = {
    "view": _reshape,
    "reshape": _reshape,
    "expand": _expand,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "new_empty": _new,
    "new_zeros": _new,
    "view_as": _view_as,
    "reshape_as": _view_as,
    "repeat": _repeat,
    "size": _size,
    "dim": _rank,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}
