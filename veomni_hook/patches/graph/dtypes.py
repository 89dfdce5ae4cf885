"""What can be told of a value: its dtype, and whether it is a number, a dtype, a tensor.

Assumed of upstream code: arithmetic that float32 takes part in meets nothing wider (no float64, no complex
numbers unless it says so), and tensors that a function is given have a dimension. Then float32 wins over every
other operand, and the canonical form says so with a cast.
"""

from __future__ import annotations

from veomni_hook.patches.graph.nodes import Node, constant
from veomni_hook.patches.graph.operations import DTYPES

__all__ = ["FLOAT32", "SAME_SHAPE", "dtype", "dtype_of", "has_dimension", "is_dtype", "is_float", "is_number"]


def dtype(path: str) -> Node:
    """The dtype of a full name like ``torch.float32``."""
    return Node("global", (), DTYPES[path])


FLOAT32 = dtype("torch.float32")
_BOOL = dtype("torch.bool")
_INT64 = dtype("torch.int64")
_FLOATS = frozenset(f"torch.{name}" for name in ("float32", "float64", "float16", "bfloat16"))
_DTYPES = frozenset(DTYPES.values())

# The same elements elsewhere, and arithmetic that keeps every dtype.
_KEEPS = frozenset(
    "slice select unsqueeze squeeze transpose permute reshape expand repeat flatten unflatten chunk split unbind "
    "repeat_interleave roll flip clone detach contiguous gather index_select masked_select masked_fill index_add "
    "scatter setitem index t neg square abs relu clamp clamp_min clamp_max sort amax amin item within to_device "
    "expand_as view_as reshape_as zeros_like ones_like topk cumsum_float".split()
)
# Refused for integers by torch.
_KEEPS_FLOAT = frozenset("silu gelu softplus mean linear rms_norm layer_norm bmm matmul softmax log_softmax".split())
# Integers become floating.
_TO_FLOAT = frozenset("sigmoid tanh exp log log1p sin cos erf sqrt rsqrt pow sum reciprocal div normalize".split())
_TESTS = frozenset("eq ne lt le logical_not logical_and logical_or is not in and or".split())
_DTYPE_ARGUMENT = {"mean": 3, "sum": 3, "softmax": 2, "log_softmax": 2, "zeros_like": 1, "ones_like": 1, "cumsum": 2}

#: Operations with the shape of their first operand.
SAME_SHAPE = frozenset(
    "cast neg square sqrt rsqrt abs exp log sigmoid tanh relu silu gelu softplus clone detach contiguous within "
    "to_device clamp softmax cos sin".split()
)


def dtype_of(node: Node) -> Node | None:
    """The dtype of a tensor: a ``global`` if it is known, else ``dtype(x)``; None for a number."""
    if is_number(node):
        return None
    known = _known(node)
    return Node("dtype", (node,)) if known is None else known


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


def is_float(found: Node | None) -> bool:
    """Whether a dtype is known to be a floating one."""
    return found is not None and found.op == "global" and found.value in _FLOATS


def has_dimension(node: Node) -> bool:
    """Whether a tensor is known to have a dimension, so that its dtype counts in a promotion."""
    while True:
        if node.op in ("argument", "unsqueeze", "cat", "stack", "slice", "chunk", "split"):
            return True
        if node.op in ("add", "sub", "mul", "div"):
            return any(has_dimension(argument) for argument in node.args)
        if node.op in ("mean", "sum", "amax", "amin"):
            if node.args[2] != constant(True):  # noqa: FBT003 - the literal
                return False
        elif node.op == "item":
            return node.args[0].op in ("chunk", "split")
        elif node.op not in SAME_SHAPE and node.op not in ("transpose", "permute", "linear", "repeat_interleave"):
            return False
        node = node.args[0]


def _known(node: Node) -> Node | None:
    op = node.op
    if op == "cast":
        return node.args[1]
    if op in ("add", "sub", "mul", "div", "where", "maximum", "minimum", "cat", "stack", "branch"):
        return _common(node)
    if op in _TESTS:
        return _BOOL
    if op in ("one_hot", "nonzero", "argmax", "argsort"):
        return _INT64
    place = _DTYPE_ARGUMENT.get(op)
    if place is not None and node.args[place] != constant(None):
        return node.args[place] if is_dtype(node.args[place]) else None
    if op == "zeros" and is_dtype(node.args[1]):
        return node.args[1]
    if op in _KEEPS:
        return dtype_of(node.args[0])
    if op in _KEEPS_FLOAT or op in _TO_FLOAT:
        found = dtype_of(node.args[0])
        return found if op in _KEEPS_FLOAT or is_float(found) else None
    return None


def _common(node: Node) -> Node | None:
    operands = node.args[1:] if node.op in ("where", "branch") else node.args
    if node.op in ("cat", "stack"):
        if operands[0].op != "tuple":
            return None
        operands = operands[0].args
    found = [dtype_of(operand) for operand in operands if not _is_weak(node, operand)]
    if not found or found.count(found[0]) != len(found):
        return None
    if node.op == "div" and not is_float(found[0]):
        return None
    # A number keeps a floating dtype; what it does to another one depends on both.
    return found[0] if len(found) == len(operands) or is_float(found[0]) else None


def _is_weak(node: Node, operand: Node) -> bool:
    return node.op not in ("cat", "stack", "branch") and is_number(operand)
