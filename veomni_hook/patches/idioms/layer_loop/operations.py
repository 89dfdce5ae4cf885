"""What functions and methods of torch do with the positions of tensors; others are not proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from veomni_hook.patches.idioms.layer_loop.shapes import (
    SHAPES,
    Rule,
    broadcast,
    inserted,
    made,
    matmul,
    met,
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
_LEFT: dict[str, Callable[[Dim], Dim | None]] = {
    "gone": lambda dim: None,
    "kept": lambda dim: dim,
    "resized": lambda dim: fresh(),
}


def _elementwise(given: Arguments) -> Value:
    result: Value = PLAIN
    for value in (*given.given, *given.named.values()):
        if isinstance(value, Tensor):
            result = broadcast(result, value) if isinstance(result, Tensor) else value
        elif not isinstance(value, Plain | Size):
            raise Missed("a value whose positions are not known")
    return result


def _along(what: str, then: str, *, place: int = 1, default: Value = NOTHING, pair: bool = False) -> Rule:
    """A rule for functions that compute along one dimension, or several.

    Args:
        what: what they compute, in words.
        then: what becomes of these dimensions, as in `_LEFT`; one that is gone has size 1 with ``keepdim``.
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
        keeps = then == "gone" and given.get(place + 1, "keepdim", "keepdims") not in (NOTHING, Plain(False))
        left = [() if keeps else _LEFT[then](dim) for dim in tensor.dims]
        dims = [left[number] if number in indices else dim for number, dim in enumerate(tensor.dims)]
        result = made([dim for dim in dims if dim is not None])
        return Items((result, result)) if pair else result

    return rule


def _maximum(given: Arguments) -> Value:
    if isinstance(given.get(1, "other"), Tensor):
        return _elementwise(given)
    return _along("a maximum", "gone", pair=True)(given)


def _parts(given: Arguments) -> Value:
    part = _along("a split", "resized", place=2, default=Plain(0))(given)
    sizes = given.get(1, "chunks", "split_size_or_sections", "split_size")
    return Items(tuple(part for _ in sizes.values)) if isinstance(sizes, Items) else Many(part)


def _tensors(given: Arguments) -> list[Value]:
    values = given.get(0, "tensors")
    if isinstance(values, Many):
        return [values.value]
    if not isinstance(values, Items) or not all(isinstance(each, Tensor | Plain) for each in values.values):
        raise Missed("tensors whose positions are not known are put together")
    return list(values.values)


def _cat(given: Arguments) -> Value:
    tensors = _tensors(given)
    held = [each for each in tensors if isinstance(each, Tensor)]
    if not held:
        return PLAIN
    dim = given.get(1, "dim", "axis", default=Plain(0))
    indices = {without(each, dim, "a concatenation") for each in held}
    kinds = {tuple(map(is_positional, each.dims)) for each in held}
    if len(indices) > 1 or len(kinds) > 1 or len(held) < len(tensors):
        raise Missed("tensors of different shapes are put together")
    columns = enumerate(zip(*(each.dims for each in held), strict=True))
    return Tensor(tuple(fresh() if number in indices else reduce(met, dims) for number, dims in columns))


def _stack(given: Arguments) -> Value:
    result: Value = PLAIN
    for each in _tensors(given):
        result = broadcast(result, each)
    place = given.get(1, "dim", default=Plain(0))
    return inserted(result, place, fresh()) if isinstance(result, Tensor) else PLAIN


def _by_index(what: str, kept: int) -> Rule:
    """A rule for functions that pair a tensor and an index; the result has the shape of one of them."""

    def rule(given: Arguments) -> Value:
        dim, chosen = given.get(1, "dim"), given.get(2, "index")
        if not isinstance(chosen, Tensor):
            raise Missed(f"{what} by an index that is not known")
        both = (given.tensor, chosen)
        indices = {without(each, dim, f"{what} by index") for each in both}
        pairs = enumerate(zip(given.tensor.dims, chosen.dims, strict=False))
        others = [pair for number, pair in pairs if number not in indices and pair[0] != pair[1]]
        if len(given.tensor.dims) != len(chosen.dims) or any(is_positional(dim) for dim in sum(others, ())):
            raise Missed("an index of another shape")
        return both[kept]

    return rule


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


_ELEMENTWISE = """
abs add add_ bfloat16 bool celu clamp clamp_ clamp_max clamp_min clone conj contiguous cos data detach
div div_ divide double dropout elu empty_like eq erf exp exp_ expm1 fill_ float floor full_like ge gelu
greater gt half hardsigmoid hardswish hardtanh imag int isfinite isinf isnan le leaky_relu less log log1p
logical_and logical_not logical_or logsigmoid long lt masked_fill masked_fill_ maximum minimum mish mul
mul_ multiply nan_to_num nan_to_num_ ne neg ones_like polar pow quick_gelu real reciprocal relu relu6
requires_grad_ round rrelu rsqrt selu sigmoid sigmoid_ sign silu silu_ sin softplus softsign sqrt square
sub sub_ subtract tanh to type type_as uniform_ where zeros_like
""".split()

#: Where no argument is: the last dimension is always meant.
_NOWHERE = 9
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("sum", "logsumexp"), _along("a sum", "gone")),
    "mean": _along("a mean", "gone"),
    "prod": _along("a product", "gone"),
    **dict.fromkeys(("amax", "amin", "argmax", "argmin"), _along("a maximum", "gone")),
    **dict.fromkeys(("any", "all"), _along("a test of all values", "gone")),
    "std": _along("a deviation", "gone"),
    "var": _along("a variance", "gone"),
    **dict.fromkeys(("norm", "vector_norm"), _along("a norm", "gone", place=2)),
    **dict.fromkeys(("max", "min"), _maximum),
    **dict.fromkeys(("softmax", "log_softmax"), _along("a softmax", "kept")),
    "cumsum": _along("a cumulative sum", "kept"),
    "topk": _along("a choice of the largest values", "resized", place=2, default=Plain(-1), pair=True),
    "sort": _along("an order", "kept", default=Plain(-1), pair=True),
    "squeeze": _along("a squeeze", "gone"),
    **dict.fromkeys(("chunk", "split"), _parts),
    "unbind": lambda given: Many(_along("an unbind", "gone", default=Plain(0))(given)),
    "repeat_interleave": _along("a repetition", "resized", place=2),
    **dict.fromkeys(("cat", "concat"), _cat),
    "stack": _stack,
    "gather": _by_index("a choice", kept=1),
    **dict.fromkeys(("scatter", "scatter_"), _by_index("a place", kept=0)),
    "linear": _along("a linear layer", "resized", place=_NOWHERE, default=Plain(-1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), _along("a norm", "kept", place=_NOWHERE, default=Plain(-1))),
    "view_as_complex": _along("complex numbers", "gone", place=_NOWHERE, default=Plain(-1)),
    "normalize": _along("a norm", "kept", place=2, default=Plain(1)),
    "pad": _pad,
    "copy_": _copied,
    **dict.fromkeys(("matmul", "bmm", "mm"), lambda given: matmul(given.get(0), given.get(1))),
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
