"""What is known about a value: its dtype, and whether it is a number, a dtype or a tensor.

Two assumptions about upstream code: float32 arithmetic has no wider operand (no float64 or complex numbers
unless the code names them), and the tensors that a function gets have at least one dimension. Float32 then
promotes every other operand, and the canonical form contains this cast.
"""

from __future__ import annotations

from veomni_hook.patches.graph.nodes import Node, constant
from veomni_hook.patches.graph.torch_operations import DTYPES

__all__ = [
    "FLOAT32",
    "SAME_SHAPE",
    "dtype_of",
    "has_dimension",
    "is_dtype",
    "is_float",
    "is_number",
    "named_dtype",
]


def named_dtype(path: str) -> Node:
    """The node of the dtype with a full name such as ``torch.float32``."""
    return Node("global", (), DTYPES[path])


FLOAT32 = named_dtype("torch.float32")
_BOOL = named_dtype("torch.bool")
_INT64 = named_dtype("torch.int64")
_FLOATS = frozenset(f"torch.{name}" for name in ("float32", "float64", "float16", "bfloat16"))
_DTYPES = frozenset(DTYPES.values())
_NONE = constant(None)
_TRUE = constant(value=True)

# Operations that keep every dtype.
_KEEP_ANY = frozenset(
    "slice select unsqueeze squeeze transpose permute reshape expand repeat flatten unflatten chunk split "
    "unbind repeat_interleave roll flip clone detach gather index_select masked_select masked_fill index_add "
    "scatter setitem neg square abs relu amax amin within to_device expand_as reshape_as zeros_like "
    "ones_like".split()
)
# Operations that keep the dtype, and that torch refuses for integers.
_KEEP_FLOAT_ONLY = frozenset("silu gelu softplus mean rms_norm layer_norm softmax log_softmax".split())
# Operations that keep floating-point dtypes and may change others. Matrix products are missing: their dtype
# depends on autocast.
_KEEP_FLOAT = frozenset(
    "sigmoid tanh exp log log1p sin cos erf sqrt rsqrt pow sum reciprocal normalize cumsum clamp clamp_min "
    "clamp_max".split()
)
# Operations with boolean and with int64 results.
_BOOLEAN = frozenset("eq ne lt le logical_not logical_and logical_or".split())
_INTEGER = frozenset("one_hot nonzero argmax argsort".split())
# Operations whose operands decide together.
_COMMON_DTYPE = frozenset("add sub mul div where maximum minimum cat stack branch".split())
# Operations with a dtype operand: its position.
_DTYPE_ARGUMENT = {
    "mean": 3,
    "sum": 3,
    "softmax": 2,
    "log_softmax": 2,
    "zeros_like": 1,
    "ones_like": 1,
    "zeros": 1,
    "cumsum": 2,
}
# Operations of which an item is a tensor.
_OF_TENSORS = frozenset("chunk split unbind cast add sub mul div unsqueeze cat stack".split())

_WITH_DIMENSION = frozenset("argument unsqueeze cat stack slice chunk split flatten unflatten".split())
#: Operations with the shape of their first operand.
SAME_SHAPE = frozenset(
    "cast neg square sqrt rsqrt abs exp log sigmoid tanh relu silu gelu softplus clone detach within "
    "to_device softmax cos sin".split()
)


def dtype_of(node: Node) -> Node | None:
    """The dtype of a tensor: a ``global`` if known, else ``dtype(x)``; None for a number."""
    dtype = node.facts.get("dtype", node)
    if dtype is node:
        dtype = None if is_number(node) else _known_dtype(node) or Node("dtype", (node,))
        node.facts["dtype"] = dtype
    return dtype


def is_number(node: Node) -> bool:
    """Whether the value is known to be a Python number."""
    if node.op == "constant":
        return isinstance(node.value, int | float)
    if node.op in ("size", "ndim", "len", "int"):
        return True
    return node.op in ("add", "sub", "mul", "floordiv", "mod", "neg", "div", "square", "sqrt", "pow") and all(
        is_number(argument) for argument in node.args
    )


def is_dtype(node: Node) -> bool:
    """Whether the value is known to be a dtype."""
    if node.op == "branch":
        return is_dtype(node.args[1]) and is_dtype(node.args[2])
    return node.op == "dtype" or (node.op == "global" and node.value in _DTYPES)


def is_float(dtype: Node | None) -> bool:
    """Whether a dtype is known to be a floating-point dtype."""
    return dtype is not None and dtype.op == "global" and dtype.value in _FLOATS


def has_dimension(node: Node) -> bool:
    """Whether a tensor is known to have at least one dimension, so that its dtype counts in a promotion."""
    known = node.facts.get("dimension")
    if known is None:
        known = node.facts["dimension"] = _TRUE if _has_dimension(node) else _NONE
    return known is _TRUE


def _has_dimension(node: Node) -> bool:
    if node.op in ("add", "sub", "mul", "div"):
        result = any(has_dimension(argument) for argument in node.args)
    elif node.op in ("mean", "sum", "amax", "amin"):
        result = node.args[2] == _TRUE and has_dimension(node.args[0])
    elif node.op in ("reshape", "expand", "repeat"):
        sizes = node.args[1]
        result = sizes.op == "tuple" and any(size.op != "star" for size in sizes.args)
    elif node.op == "item":
        result = node.args[0].op in ("chunk", "split")
    elif node.op in SAME_SHAPE or node.op in ("transpose", "permute", "repeat_interleave"):
        result = has_dimension(node.args[0])
    elif _is_activation(node):
        result = has_dimension(node.args[1])
    else:
        result = node.op in _WITH_DIMENSION
    return result


def _known_dtype(node: Node) -> Node | None:
    """The dtype as a node other than ``dtype(node)``, or None."""
    op = node.op
    position = _DTYPE_ARGUMENT.get(op)
    if position is not None and node.args[position] != _NONE:
        dtype = node.args[position] if is_dtype(node.args[position]) else None
    elif op == "cast":
        dtype = node.args[1]
    elif op in _COMMON_DTYPE:
        dtype = _common_dtype(node)
    elif op in _BOOLEAN:
        dtype = _BOOL
    elif op in _INTEGER:
        dtype = _INT64
    elif op == "item" and node.args[0].op in ("topk", "sort"):
        dtype = dtype_of(node.args[0].args[0]) if node.args[1] == constant(0) else _INT64
    elif op in _KEEP_ANY or op in _KEEP_FLOAT_ONLY or (op == "item" and node.args[0].op in _OF_TENSORS):
        dtype = dtype_of(node.args[0])
    elif _is_activation(node):
        dtype = dtype_of(node.args[1])
    elif op in _KEEP_FLOAT:
        dtype = dtype_of(node.args[0])
        dtype = dtype if is_float(dtype) and all(map(_keeps_dtype, node.args[1:])) else None
    else:
        dtype = None
    return dtype


def _common_dtype(node: Node) -> Node | None:
    """The dtype of all operands; None if they differ."""
    operands = node.args[1:] if node.op in ("where", "branch") else node.args
    if node.op in ("cat", "stack"):
        if operands[0].op != "tuple":
            return None
        operands = operands[0].args
    weak = node.op not in ("cat", "stack", "branch")
    dtypes = [dtype_of(operand) for operand in operands if not (weak and is_number(operand))]
    if not dtypes or dtypes.count(dtypes[0]) != len(dtypes):
        return None
    dtype = dtypes[0]
    if node.op == "div" and not is_float(dtype):
        return None
    # A number keeps a floating-point dtype; for other dtypes the result depends on both.
    return dtype if len(dtypes) == len(operands) or is_float(dtype) else None


def _is_activation(node: Node) -> bool:
    """Whether a call keeps dtype and shape: an entry of ACT2FN, or a function parameter of a reference."""
    if node.op != "call" or len(node.args) != 2:
        return False
    callee = node.args[0]
    if callee.op in ("index", "item"):
        callee = callee.args[0]
        return callee.op == "global" and str(callee.value).endswith("activations.ACT2FN")
    return "elementwise" in callee.facts


def _keeps_dtype(node: Node) -> bool:
    """Whether an operand after the first cannot change the dtype."""
    return node.op in ("constant", "tuple") or is_number(node)
