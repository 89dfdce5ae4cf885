"""What is known about a value: its dtype, and whether it is a number, a dtype or a tensor.

Two assumptions about upstream code: float32 arithmetic has no wider operand (no float64 or complex numbers
unless the code names them), and the tensors that a function gets have at least one dimension. Float32 then
promotes every other operand, and the canonical form contains this cast.
"""

from __future__ import annotations

from veomni_hook.patches.graph.nodes import Node, constant
from veomni_hook.patches.graph.torch_operations import DTYPES

__all__ = ["FLOAT32", "SAME_SHAPE", "dtype", "dtype_of", "has_dimension", "is_dtype", "is_float", "is_number"]


def dtype(path: str) -> Node:
    """The node of the dtype with a full name such as ``torch.float32``."""
    return Node("global", (), DTYPES[path])


FLOAT32 = dtype("torch.float32")
_BOOL = dtype("torch.bool")
_INT64 = dtype("torch.int64")
_FLOATS = frozenset(f"torch.{name}" for name in ("float32", "float64", "float16", "bfloat16"))
_DTYPES = frozenset(DTYPES.values())
_NONE = constant(None)
_TRUE = constant(value=True)

# Operations that keep every dtype.
_KEEPS = frozenset(
    "slice select unsqueeze squeeze transpose permute reshape expand repeat flatten unflatten chunk split "
    "unbind repeat_interleave roll flip clone detach gather index_select masked_select masked_fill index_add "
    "scatter setitem neg square abs relu amax amin within to_device expand_as reshape_as zeros_like "
    "ones_like".split()
)
# Operations that keep the dtype, and that torch refuses for integers.
_KEEPS_FLOAT = frozenset("silu gelu softplus mean rms_norm layer_norm softmax log_softmax".split())
# Operations that keep floating-point dtypes and may change others. Matrix products are missing: their dtype
# depends on autocast.
_OF_FLOAT = frozenset(
    "sigmoid tanh exp log log1p sin cos erf sqrt rsqrt pow sum reciprocal normalize cumsum clamp clamp_min "
    "clamp_max".split()
)
_TESTS = frozenset("eq ne lt le logical_not logical_and logical_or".split())
_WHOLE = frozenset("one_hot nonzero argmax argsort".split())
_OF_ALL = frozenset("add sub mul div where maximum minimum cat stack branch".split())
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
_PARTED = frozenset("chunk split unbind cast add sub mul div unsqueeze cat stack".split())

_WITH_DIMENSION = frozenset("argument unsqueeze cat stack slice chunk split flatten unflatten".split())
#: Operations with the shape of their first operand.
SAME_SHAPE = frozenset(
    "cast neg square sqrt rsqrt abs exp log sigmoid tanh relu silu gelu softplus clone detach within "
    "to_device softmax cos sin".split()
)


def dtype_of(node: Node) -> Node | None:
    """The dtype of a tensor: a ``global`` if known, else ``dtype(x)``; None for a number."""
    found = node.facts.get("dtype", node)
    if found is node:
        known = None if is_number(node) else _known(node)
        found = known if known is not None or is_number(node) else Node("dtype", (node,))
        node.facts["dtype"] = found
    return found


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
    """Whether a dtype is known to be a floating-point dtype."""
    return found is not None and found.op == "global" and found.value in _FLOATS


def has_dimension(node: Node) -> bool:
    """Whether a tensor is known to have at least one dimension, so that its dtype counts in a promotion."""
    known = node.facts.get("dimension")
    if known is None:
        known = node.facts["dimension"] = _TRUE if _has_dimension(node) else _NONE
    return known is _TRUE


def _has_dimension(node: Node) -> bool:
    if node.op in ("add", "sub", "mul", "div"):
        found = any(has_dimension(argument) for argument in node.args)
    elif node.op in ("mean", "sum", "amax", "amin"):
        found = node.args[2] == _TRUE and has_dimension(node.args[0])
    elif node.op in ("reshape", "expand", "repeat"):
        sizes = node.args[1]
        found = sizes.op == "tuple" and any(size.op != "star" for size in sizes.args)
    elif node.op == "item":
        found = node.args[0].op in ("chunk", "split")
    elif node.op in SAME_SHAPE or node.op in ("transpose", "permute", "repeat_interleave"):
        found = has_dimension(node.args[0])
    elif _is_activation(node):
        found = has_dimension(node.args[1])
    else:
        found = node.op in _WITH_DIMENSION
    return found


def _known(node: Node) -> Node | None:
    """The dtype as a node other than ``dtype(node)``, or None."""
    op = node.op
    place = _DTYPE_ARGUMENT.get(op)
    if place is not None and node.args[place] != _NONE:
        found = node.args[place] if is_dtype(node.args[place]) else None
    elif op == "cast":
        found = node.args[1]
    elif op in _OF_ALL:
        found = _common(node)
    elif op in _TESTS:
        found = _BOOL
    elif op in _WHOLE:
        found = _INT64
    elif op == "item" and node.args[0].op in ("topk", "sort"):
        found = dtype_of(node.args[0].args[0]) if node.args[1] == constant(0) else _INT64
    elif op in _KEEPS or op in _KEEPS_FLOAT or (op == "item" and node.args[0].op in _PARTED):
        found = dtype_of(node.args[0])
    elif _is_activation(node):
        found = dtype_of(node.args[1])
    elif op in _OF_FLOAT:
        found = dtype_of(node.args[0])
        found = found if is_float(found) and all(map(_is_mild, node.args[1:])) else None
    else:
        found = None
    return found


def _common(node: Node) -> Node | None:
    operands = node.args[1:] if node.op in ("where", "branch") else node.args
    if node.op in ("cat", "stack"):
        if operands[0].op != "tuple":
            return None
        operands = operands[0].args
    weak = node.op not in ("cat", "stack", "branch")
    found = [dtype_of(operand) for operand in operands if not (weak and is_number(operand))]
    if not found or found.count(found[0]) != len(found):
        return None
    if node.op == "div" and not is_float(found[0]):
        return None
    # A number keeps a floating-point dtype; for other dtypes the result depends on both.
    return found[0] if len(found) == len(operands) or is_float(found[0]) else None


def _is_activation(node: Node) -> bool:
    """Whether a call keeps dtype and shape: an entry of ACT2FN, or a function parameter of a reference."""
    if node.op != "call" or len(node.args) != 2:
        return False
    callee = node.args[0]
    if callee.op in ("index", "item"):
        callee = callee.args[0]
        return callee.op == "global" and str(callee.value).endswith("activations.ACT2FN")
    return "elementwise" in callee.facts


def _is_mild(node: Node) -> bool:
    """Whether an operand after the first cannot change the dtype."""
    return node.op in ("constant", "tuple") or is_number(node)
