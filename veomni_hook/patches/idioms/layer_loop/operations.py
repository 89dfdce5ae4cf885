"""What functions and methods of torch do with the positions of tensors; others are not proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from veomni_hook.patches.idioms.layer_loop.shapes import (
    SHAPES,
    Rule,
    axis,
    broadcast,
    made,
    matmul,
    without,
)
from veomni_hook.patches.idioms.layer_loop.values import (
    NOTHING,
    PLAIN,
    Arguments,
    Dim,
    Items,
    Many,
    Plain,
    Size,
    Tensor,
    Value,
    bare,
    fresh,
    is_positional,
)
from veomni_hook.patches.site import Code, Missed

__all__ = ["operation", "torch_name"]


#: What is left of a dimension along which a call computes; None for nothing.
_Then: TypeAlias = "Callable[[Dim], Dim | None]"


def _elementwise(given: Arguments) -> Value:
    result: Value = PLAIN
    for value in (*given.given, *given.named.values()):
        if isinstance(value, Tensor):
            result = broadcast(result, value) if isinstance(result, Tensor) else value
        elif not isinstance(value, Plain | Size):
            raise Missed("a value whose positions are not known")
    return result


def _along(what: str, then: _Then, *, place: int = 1, default: Value = NOTHING, pair: bool = False) -> Rule:
    """A rule for functions that compute along one dimension, or several.

    Args:
        what: what they compute, in words.
        then: what becomes of these dimensions; one that is gone has one element with ``keepdim``.
        place: where the call names them, without a keyword.
        default: the dimension that a call means that names none.
        pair: whether there are two results.
    """

    def rule(given: Arguments) -> Value:
        tensor = given.tensor
        dim = given.get(place, "dim", "axis", default=default)
        if dim == NOTHING:
            raise Missed(f"{what} over all dimensions", code=Code.MIXES_POSITIONS)
        indices = {without(tensor, each, what) for each in (dim.values if isinstance(dim, Items) else (dim,))}
        keeps = then is _gone and given.get(place + 1, "keepdim", "keepdims") not in (NOTHING, Plain(False))
        left = [() if keeps else then(dim) for dim in tensor.dims]
        dims = [left[number] if number in indices else dim for number, dim in enumerate(tensor.dims)]
        result = made([dim for dim in dims if dim is not None])
        return Items((result, result)) if pair else result

    return rule


def _gone(dim: Dim) -> Dim | None:
    return None


def _kept(dim: Dim) -> Dim | None:
    return dim


def _resized(dim: Dim) -> Dim | None:
    return fresh()


def _maximum(given: Arguments) -> Value:
    if isinstance(given.get(1, "other"), Tensor):
        return _elementwise(given)
    return _along("a maximum", _gone, pair=True)(given)


def _parts(given: Arguments) -> Value:
    part = _along("a split", _resized, place=2, default=Plain(0))(given)
    sizes = given.get(1, "chunks", "split_size_or_sections", "split_size")
    return Items(tuple(part for _ in sizes.values)) if isinstance(sizes, Items) else Many(part)


def _unbind(given: Arguments) -> Value:
    return Many(_along("an unbind", _gone, default=Plain(0))(given))


def _tensors(given: Arguments) -> list[Value]:
    values = given.get(0, "tensors")
    if isinstance(values, Many):
        return [values.value]
    if not isinstance(values, Items) or not all(isinstance(each, Tensor | Plain) for each in values.values):
        raise Missed("tensors whose positions are not known are put together")
    return list(values.values)


def _cat(given: Arguments) -> Value:
    tensors = _tensors(given)
    if not any(isinstance(each, Tensor) for each in tensors):
        return PLAIN
    held = [each for each in tensors if isinstance(each, Tensor)]
    dim = given.get(1, "dim", "axis", default=Plain(0))
    indices = {without(each, dim, "a concatenation") for each in held}
    if len(indices) > 1 or len(held) < len(tensors):
        raise Missed("tensors of different shapes are put together")
    (index,) = indices
    dims: list[Dim] = list(held[0].dims)
    for each in held[1:]:
        joined = broadcast(Tensor((*dims[:index], ("S",))), Tensor((*each.dims[:index], ("S",))))
        if [is_positional(dim) for dim in each.dims] != [is_positional(dim) for dim in dims]:
            raise Missed("tensors of different shapes are put together")
        dims[:index] = joined.dims[:index] if isinstance(joined, Tensor) else dims[:index]
    dims[index] = fresh()
    return Tensor(tuple(dims))


def _stack(given: Arguments) -> Value:
    result: Value = PLAIN
    for each in _tensors(given):
        result = broadcast(result, each)
    if not isinstance(result, Tensor):
        return PLAIN
    dims = list(result.dims)
    dims.insert(axis(result, given.get(1, "dim", default=Plain(0)), extra=1), fresh())
    return Tensor(tuple(dims))


def _one_hot(given: Arguments) -> Value:
    return Tensor((*given.tensor.dims, fresh()))


def _gather(given: Arguments) -> Value:
    index, chosen = given.get(1, "dim"), given.get(2, "index")
    if not isinstance(chosen, Tensor):
        raise Missed("a choice by an index that is not known")
    without(given.tensor, index, "a choice by index")
    without(chosen, index, "a choice by index")
    _only_apart(given.tensor, chosen, axis(chosen, index))
    return chosen


def _scatter(given: Arguments) -> Value:
    index, chosen = given.get(1, "dim"), given.get(2, "index")
    if not isinstance(chosen, Tensor):
        raise Missed("a place by an index that is not known")
    without(given.tensor, index, "a place by index")
    _only_apart(given.tensor, chosen, axis(chosen, index))
    return given.tensor


def _only_apart(one: Tensor, other: Tensor, index: int) -> None:
    """Two tensors that differ in one dimension alone."""
    pairs = list(zip(one.dims, other.dims, strict=False))
    for number, (mine, yours) in enumerate(pairs):
        if number != index and mine != yours and (is_positional(mine) or is_positional(yours)):
            raise Missed("an index of another shape")
    if len(one.dims) != len(other.dims):
        raise Missed("an index of another shape")


def _linear(given: Arguments) -> Value:
    tensor = given.tensor
    if is_positional(tensor.dims[-1]):
        raise Missed("a linear layer over the positions", code=Code.MIXES_POSITIONS)
    return made([*tensor.dims[:-1], fresh()])


def _last(given: Arguments) -> Value:
    if is_positional(given.tensor.dims[-1]):
        raise Missed("a norm over the positions", code=Code.MIXES_POSITIONS)
    return given.tensor


def _pad(given: Arguments) -> Value:
    widths = given.get(1, "pad")
    if not isinstance(widths, Items) or len(widths.values) != 2 or is_positional(given.tensor.dims[-1]):
        raise Missed("padding that may move positions", code=Code.MIXES_POSITIONS)
    return Tensor((*given.tensor.dims[:-1], fresh()))


def _copied(given: Arguments) -> Value:
    tensor, result = given.tensor, _elementwise(given)
    if not isinstance(result, Tensor) or len(result.dims) > len(tensor.dims):
        raise Missed("a copy of another shape")
    return tensor


def _matmul(given: Arguments) -> Value:
    return matmul(given.get(0), given.get(1))


_ELEMENTWISE = """
abs add add_ bfloat16 bool celu clamp clamp_ clamp_max clamp_min clone conj contiguous cos data detach
div div_ divide double dropout elu empty_like eq erf exp exp_ expm1 fill_ float floor full_like ge gelu
greater gt half hardsigmoid hardswish hardtanh imag int isfinite isinf isnan le leaky_relu less log log1p
logical_and logical_not logical_or logsigmoid long lt masked_fill masked_fill_ maximum minimum mish mul
mul_ multiply nan_to_num nan_to_num_ ne neg ones_like polar pow quick_gelu real reciprocal relu relu6
requires_grad_ round rrelu rsqrt selu sigmoid sigmoid_ sign silu silu_ sin softplus softsign sqrt square
sub sub_ subtract tanh to type type_as uniform_ where zeros_like
""".split()

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    "sum": _along("a sum", _gone),
    "mean": _along("a mean", _gone),
    "prod": _along("a product", _gone),
    "amax": _along("a maximum", _gone),
    "amin": _along("a minimum", _gone),
    "any": _along("a test of all values", _gone),
    "all": _along("a test of all values", _gone),
    "argmax": _along("a maximum", _gone),
    "argmin": _along("a minimum", _gone),
    "std": _along("a deviation", _gone),
    "var": _along("a variance", _gone),
    "logsumexp": _along("a sum", _gone),
    "norm": _along("a norm", _gone, place=2),
    "vector_norm": _along("a norm", _gone, place=2),
    "max": _maximum,
    "min": _maximum,
    "softmax": _along("a softmax", _kept),
    "log_softmax": _along("a softmax", _kept),
    "cumsum": _along("a cumulative sum", _kept),
    "topk": _along("a choice of the largest values", _resized, place=2, default=Plain(-1), pair=True),
    "sort": _along("an order", _kept, default=Plain(-1), pair=True),
    "squeeze": _along("a squeeze", _gone),
    "chunk": _parts,
    "split": _parts,
    "unbind": _unbind,
    "repeat_interleave": _along("a repetition", _resized, place=2),
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "one_hot": _one_hot,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_": _scatter,
    "linear": _linear,
    "layer_norm": _last,
    "rms_norm": _last,
    "normalize": _along("a norm", _kept, place=2, default=Plain(1)),
    "pad": _pad,
    "copy_": _copied,
    "matmul": _matmul,
    "bmm": _matmul,
    "mm": _matmul,
    **SHAPES,
}

_HOMES = ("torch", "torch.nn.functional", "torch.linalg", "torch.special")


def torch_name(dotted: str) -> str:
    """The name of a function of torch that this module may know; empty for other functions."""
    home, _, name = dotted.rpartition(".")
    return name if home in _HOMES else ""


def operation(name: str, given: Sequence[Value], named: Mapping[str, Value] | None = None) -> Value:
    """The result of a function of torch, or of a tensor's method.

    Raises:
        Missed: it is not known, or it moves or mixes positions.
    """
    if name not in _RULES:
        raise Missed(f"it calls {name}, which may mix positions", code=Code.MIXES_POSITIONS)
    named = {key: bare(value) for key, value in (named or {}).items()}
    return _RULES[name](Arguments(tuple(map(bare, given)), named))
