"""What functions of Python and torch, and methods of tensors, do with positions; others are not proven."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from veomni_hook.patches.code.tree import last_name
from veomni_hook.patches.idioms.layer_loop.shapes import (
    FILLED,
    SHAPES,
    Rule,
    broadcast,
    filled,
    inserted,
    made,
    matmul,
    met,
    without,
)
from veomni_hook.patches.idioms.layer_loop.values import (
    NOTHING,
    PLAIN,
    SLICE,
    Arguments,
    Dim,
    Items,
    Many,
    Module,
    Plain,
    Size,
    Tensor,
    Unknown,
    Value,
    Whole,
    bare,
    fresh,
    is_positional,
    of_all,
    tensor_like,
)
from veomni_hook.patches.site import Code, Missed

__all__ = ["check_known", "of_function", "of_torch_module", "operation"]

#: What is left of a dimension along which a call computes; None for nothing.
_LEFT: dict[str, Callable[[Dim], Dim | None]] = {
    "gone": lambda dim: None,
    "kept": lambda dim: dim,
    "resized": lambda dim: fresh(),
}


def _elementwise(arguments: Arguments) -> Value:
    result: Value = PLAIN
    for value in (*arguments.given, *arguments.named.values()):
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

    def rule(arguments: Arguments) -> Value:
        tensor = arguments.tensor
        dim = arguments.get(place, "dim", "axis", default=default)
        if dim == NOTHING:
            raise Missed(f"{what} over all dimensions", code=Code.MIXES_POSITIONS)
        indices = {
            without(tensor, value, what) for value in (dim.values if isinstance(dim, Items) else (dim,))
        }
        keeps = then == "gone" and arguments.get(place + 1, "keepdim", "keepdims") not in (
            NOTHING,
            Plain(False),
        )
        left = [() if keeps else _LEFT[then](dim) for dim in tensor.dims]
        dims = [left[number] if number in indices else dim for number, dim in enumerate(tensor.dims)]
        result = made([dim for dim in dims if dim is not None])
        return Items((result, result)) if pair else result

    return rule


def _maximum(arguments: Arguments) -> Value:
    if isinstance(arguments.get(1, "other"), Tensor):
        return _elementwise(arguments)
    return _along("a maximum", "gone", pair=True)(arguments)


def _parts(arguments: Arguments) -> Value:
    part = _along("a split", "resized", place=2, default=Plain(0))(arguments)
    sizes = arguments.get(1, "chunks", "split_size_or_sections", "split_size")
    return Items(tuple(part for _ in sizes.values)) if isinstance(sizes, Items) else Many(part)


def _tensors(arguments: Arguments) -> list[Value]:
    values = arguments.get(0, "tensors")
    if isinstance(values, Many):
        return [values.value]
    if not isinstance(values, Items) or not all(isinstance(value, Tensor | Plain) for value in values.values):
        raise Missed("tensors whose positions are not known are put together")
    return list(values.values)


def _cat(arguments: Arguments) -> Value:
    tensors = _tensors(arguments)
    operands = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if not operands:
        return PLAIN
    dim = arguments.get(1, "dim", "axis", default=Plain(0))
    indices = {without(operand, dim, "a concatenation") for operand in operands}
    kinds = {tuple(map(is_positional, operand.dims)) for operand in operands}
    if len(indices) > 1 or len(kinds) > 1 or len(operands) < len(tensors):
        raise Missed("tensors of different shapes are put together")
    columns = enumerate(zip(*(operand.dims for operand in operands), strict=True))
    return Tensor(tuple(fresh() if number in indices else reduce(met, dims) for number, dims in columns))


def _stack(arguments: Arguments) -> Value:
    result: Value = PLAIN
    for tensor in _tensors(arguments):
        result = broadcast(result, tensor)
    place = arguments.get(1, "dim", default=Plain(0))
    return inserted(result, place, fresh()) if isinstance(result, Tensor) else PLAIN


def _by_index(what: str, kept: int) -> Rule:
    """A rule for functions that pair a tensor and an index; the result has the shape of one of them."""

    def rule(arguments: Arguments) -> Value:
        dim, chosen = arguments.get(1, "dim"), arguments.get(2, "index")
        if not isinstance(chosen, Tensor):
            raise Missed(f"{what} by an index that is not known")
        both = (arguments.tensor, chosen)
        indices = {without(tensor, dim, f"{what} by index") for tensor in both}
        pairs = enumerate(zip(arguments.tensor.dims, chosen.dims, strict=False))
        others = [pair for number, pair in pairs if number not in indices and pair[0] != pair[1]]
        if len(arguments.tensor.dims) != len(chosen.dims) or any(
            is_positional(dim) for dim in sum(others, ())
        ):
            raise Missed("an index of another shape")
        return both[kept]

    return rule


def _pad(arguments: Arguments) -> Value:
    widths = arguments.get(1, "pad")
    if not isinstance(widths, Items) or len(widths.values) != 2 or is_positional(arguments.tensor.dims[-1]):
        raise Missed("padding that may move positions", code=Code.MIXES_POSITIONS)
    return Tensor((*arguments.tensor.dims[:-1], fresh()))


def _copied(arguments: Arguments) -> Value:
    tensor, result = arguments.tensor, _elementwise(arguments)
    if not isinstance(result, Tensor) or len(result.dims) > len(tensor.dims):
        raise Missed("a copy of another shape")
    return tensor


_ELEMENTWISE = """
abs add add_ bfloat16 bool celu clamp clamp_ clamp_max clamp_min clone conj contiguous cos data detach
div div_ divide double dropout elu empty_like eq erf exp exp_ expm1 fill_ float floor full_like ge gelu
greater gt half hardsigmoid hardswish hardtanh imag int isfinite isinf isnan le leaky_relu less log log1p
logical_and logical_not logical_or logsigmoid long lt masked_fill masked_fill_ maximum minimum mish mul
mul_ multiply nan_to_num nan_to_num_ ne neg ones_like polar pow quick_gelu real reciprocal relu relu6
remainder requires_grad_ round rrelu rsqrt selu sigmoid sigmoid_ sign silu silu_ sin softplus softsign sqrt
square sub sub_ subtract tanh to type type_as uniform_ where zeros_like
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
    "unbind": lambda arguments: Many(_along("an unbind", "gone", default=Plain(0))(arguments)),
    "repeat_interleave": _along("a repetition", "resized", place=2),
    **dict.fromkeys(("cat", "concat"), _cat),
    "stack": _stack,
    "gather": _by_index("a choice", kept=1),
    **dict.fromkeys(("scatter", "scatter_", "scatter_add_"), _by_index("a place", kept=0)),
    "linear": _along("a linear layer", "resized", place=_NOWHERE, default=Plain(-1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), _along("a norm", "kept", place=_NOWHERE, default=Plain(-1))),
    "view_as_complex": _along("complex numbers", "gone", place=_NOWHERE, default=Plain(-1)),
    "normalize": _along("a norm", "kept", place=2, default=Plain(1)),
    "pad": _pad,
    "copy_": _copied,
    **dict.fromkeys(("matmul", "bmm", "mm"), lambda arguments: matmul(arguments.get(0), arguments.get(1))),
    **SHAPES,
}


_HOMES = ("torch", "torch.nn.functional", "torch.linalg", "torch.special")
_CAST = "torch.amp.autocast_mode._cast"
_RANDOM = {"bernoulli", "rand", "randint", "randn", "randperm"}
_POINTWISE = """
Dropout ELU GELU Hardtanh Identity LeakyReLU ReLU ReLU6 SELU SiLU Sigmoid Softplus Tanh
""".split()
#: Classes of modules, torch's and others, as the operation that they do.
_MODULES = {
    **dict.fromkeys(_POINTWISE, "silu"),
    "Linear": "linear",
    "LayerNorm": "layer_norm",
    "RMSNorm": "layer_norm",
    "Embedding": "one_hot",
}


def of_function(dotted: str, arguments: Arguments, node: ast.Call) -> Value | None:
    """The result of a function that is known by its full name; None for others.

    Raises:
        Missed: it is not followed, needs values of positions, or moves or mixes positions.
    """
    home, _, name = dotted.rpartition(".")
    if dotted.startswith("builtins."):
        return _builtin(name, [*arguments.given, *arguments.named.values()], node)
    if home in _HOMES:
        return _of_torch(name, arguments)
    if dotted.startswith("torch.nn.") and name[:1].isupper():
        return Module((dotted,))
    if dotted.partition(".")[0] in (":logger", "warnings"):
        return PLAIN
    return arguments.given[0] if dotted == _CAST and arguments.given else None


def _of_torch(name: str, arguments: Arguments) -> Value:
    if name in _RANDOM:
        raise Missed("it draws random numbers, which differ between ranks", code=Code.RANDOM)
    check_known(arguments)
    if any(isinstance(value, Tensor) for value in arguments.every):
        return operation(name, arguments.given, arguments.named)
    if name in FILLED:
        return filled(arguments)
    if any(isinstance(value, Size) and is_positional(value.dim) for value in arguments.every):
        raise Missed(f"it calls {name} with the number of positions", code=Code.MIXES_POSITIONS)
    return PLAIN


def of_torch_module(name: str, arguments: Arguments) -> Value:
    """The result of a module of torch; raises `Missed` if it may mix positions."""
    value, name = tensor_like(arguments.first), name.removeprefix("torch.nn.")
    if not isinstance(value, Tensor):
        return PLAIN
    if name not in _MODULES:
        raise Missed(f"it calls torch's {name}, which may mix positions", code=Code.MIXES_POSITIONS)
    return operation(_MODULES[name], [value])


def check_known(arguments: Arguments) -> None:
    """Raise `Missed` if an argument holds all positions, or is not known."""
    for value in arguments.every:
        if isinstance(value, Whole | Unknown):
            tensor_like(value)


def operation(name: str, positional: Sequence[Value], named: Mapping[str, Value] | None = None) -> Value:
    """The result of a function of torch, or of a tensor's method.

    Raises:
        Missed: it is not known, or it moves or mixes positions.
    """
    if name not in _RULES:
        raise Missed(f"it calls {name}, which may mix positions", code=Code.MIXES_POSITIONS)
    named = {key: bare(value) for key, value in (named or {}).items()}
    return _RULES[name](Arguments(tuple(map(bare, positional)), named))


def _length(arguments: list[Value]) -> Value:
    """What ``len`` gives."""
    if isinstance(arguments[0], Tensor):
        return Size(arguments[0].dims[0])
    return Plain(len(arguments[0].values)) if isinstance(arguments[0], Items) else PLAIN


def _numbered(arguments: list[Value]) -> Value:
    """What ``enumerate`` gives."""
    value = arguments[0]
    if not isinstance(value, Items):
        return _zipped([PLAIN, value if isinstance(value, Tensor | Many | Whole) else PLAIN])
    numbers = (PLAIN if arguments[1:] else Plain(number) for number in range(len(value.values)))
    return _zipped([Items(tuple(numbers)), value])


def _zipped(arguments: list[Value]) -> Value:
    """What ``zip`` gives."""
    if any(isinstance(value, Tensor) for value in arguments):
        raise Missed("a loop over positions", code=Code.MIXES_POSITIONS)
    if all(isinstance(value, Items) for value in arguments):
        rows = zip(*(value.values for value in arguments if isinstance(value, Items)), strict=False)
        return Items(tuple(Items(row) for row in rows))
    if any(isinstance(value, Items) for value in arguments):
        raise Missed("a loop that is not followed")
    return Many(Items(tuple(value.value if isinstance(value, Many) else value for value in arguments)))


_QUESTIONS = {"hasattr", "isinstance", "callable", "issubclass", "type", "id", "print", "repr"}
_NUMBERS = {"abs", "bool", "float", "int", "max", "min", "round", "str", "sum", "pow", "divmod"}
_LOOPS = {"range", "reversed", "sorted", "set", "dict"}
_LISTS: dict[str, Callable[[list[Value]], Value]] = {
    "enumerate": _numbered,
    "len": _length,
    "list": lambda arguments: arguments[0] if arguments else PLAIN,
    "tuple": lambda arguments: arguments[0] if arguments else PLAIN,
    "zip": _zipped,
}


def _builtin(name: str, arguments: list[Value], node: ast.Call) -> Value:
    """The result of a call of a function of Python.

    Raises:
        Missed: it is not followed, or needs values of positions.
    """
    first = arguments[0] if arguments else PLAIN
    if name == "isinstance" and isinstance(first, Tensor) and last_name(node.args[1]) == "tuple":
        return Plain(False)
    if name in _QUESTIONS:
        return PLAIN
    if name in _LISTS:
        return _LISTS[name](arguments)
    if name not in (*_NUMBERS, *_LOOPS, "getattr", "slice"):
        raise Missed(f"it calls {name}, which is not followed")
    for value in arguments if name == "slice" else of_all(arguments):
        if isinstance(value, Whole) and name == "getattr":
            return value
        if isinstance(tensor_like(value), Tensor):
            raise Missed(f"{name} of values of some positions", code=Code.MIXES_POSITIONS)
    kept = first if name in _LOOPS and isinstance(first, Items | Many) else PLAIN
    return SLICE if name == "slice" else kept
