"""The torch operations that the canonical form knows, and what is known about their results.

An operation has one name here, whether upstream writes it as a function of torch, as one of
torch.nn.functional, or as a method. Everything else is an opaque call.

Two assumptions about upstream code: float32 arithmetic has no wider operand (no float64 or complex numbers
unless the code names them), and the tensors that a function gets have at least one dimension. Float32 then
promotes every other operand, and the canonical form contains this cast.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from veomni_hook.patches.graph.nodes import Node, constant

__all__ = [
    "DTYPES",
    "FLOAT32",
    "SAME_SHAPE",
    "Operation",
    "dtype_of",
    "function",
    "has_dimension",
    "is_dtype",
    "is_float",
    "is_fresh",
    "is_number",
    "is_pure",
    "method",
    "named_dtype",
    "roots",
]


@dataclass(frozen=True, slots=True)
class Operation:
    """Parameters of an operation: names, and defaults (None: required).

    ``variadic`` is the number of the parameter that a method also accepts as separate arguments.
    """

    name: str
    parameters: tuple[str, ...]
    defaults: tuple[Node | None, ...]
    variadic: int | None = None


# t: torch.<name>, f: torch.nn.functional.<name>, m: Tensor.<name>, -: what only nodes are. A star marks a
# parameter that a method also accepts as separate arguments. Names separated by a slash are the same
# operation (`reshape` has the values of `view`, and works where that raises); `mod=` in front of them names
# their node. After the colon stands what is known of the result:
#
# keep    It has the dtype of the first operand.
# float   It has, if that is a floating-point dtype. Matrix products are missing: theirs depends on autocast.
# common  It has the dtype of all operands, if they agree.
# bool, int64
# dtype   The operand of this name decides, unless it is None.
# shape   It has the shape of the first operand.
# dim     It has a dimension.
# own     It has its own memory.
# parts   It is a sequence of tensors, each with its own memory.
# view    It may be the first operand, or a view of it.
# holds   It may be any operand, or a view of it.
# items   An item of it is a tensor of the same dtype.
_TABLE = """
tm mul/multiply input other : common own items
tm sub/subtract input other alpha=1 : common own items
tm add input other alpha=1 : common own items
tm div/divide input other rounding_mode=None : common own items
tm floordiv=floor_divide input other : own
tm mod=remainder input other : own
tm neg/negative input : keep own shape
tm pow input exponent : float own
tm square input : keep own shape
tm sqrt input : float own shape
tm rsqrt input : float own shape
tm reciprocal input : float
tm abs/absolute input : keep own shape
tm exp input : float own shape
tm log input : float own shape
tm log1p input : float
tm sin input : float own shape
tm cos input : float own shape
tm erf input : float
tm floor input
tm round input decimals=0
tm sign input
tmf sigmoid input : float own shape
tmf tanh input : float own shape
tm relu input : keep own shape
f relu input inplace=False
f silu input inplace=False : keep own shape
f gelu input approximate='none' : keep own shape
f softplus input beta=1 threshold=20 : keep own shape
tm maximum input other : common own
tm minimum input other : common own
tm clamp/clip input min=None max=None : float own
tm clamp_min input min : float own
tm clamp_max input max : float own
tm mean input dim=None keepdim=False dtype=None : keep dtype own
tm sum input dim=None keepdim=False dtype=None : float dtype own
tm amax input dim=() keepdim=False : keep
tm amin input dim=() keepdim=False : keep
tm argmax input dim=None keepdim=False : int64
tm topk input k dim=-1 largest=True sorted=True : parts
tm sort input dim=-1 descending=False : parts
tm argsort input dim=-1 descending=False : int64
tm cumsum input dim dtype=None : float dtype own
tm gather input dim index : keep own
tm scatter input dim index src : keep own
tm scatter_add input dim index src : own
tm index_add input dim index source alpha=1 : keep own
tm index_select input dim index : keep own
tm masked_fill input mask value : keep own
tm masked_select input mask : keep
tm nonzero input as_tuple=False : int64
tm eq input other : bool own
tm ne/not_equal input other : bool own
tm lt/less input other : bool own
tm le/less_equal input other : bool own
tm gt/greater input other
tm ge/greater_equal input other
tm logical_not input : bool own
tm logical_and input other : bool own
tm logical_or input other : bool own
t where condition input=() other=() : common own
f one_hot tensor num_classes=-1 : int64 own
f linear input weight bias=None : own
f softmax input dim=None _stacklevel=3 dtype=None : keep dtype own shape
tm softmax input dim dtype=None
f log_softmax input dim=None _stacklevel=3 dtype=None : keep dtype own
tm matmul/mm input other : own
tm bmm input mat2 : own
t einsum equation operands
t cat/concat/concatenate tensors dim=0 : common own items dim
t stack tensors dim=0 : common own items dim
tm unsqueeze input dim : keep view items dim
tm squeeze input dim=() : keep view
tm transpose/swapaxes/swapdims input dim0 dim1 : keep view
tm t input
m permute input *dims : keep view
t permute input dims
m reshape/view input *shape : keep view
t reshape input shape
m expand input *shape : keep view
m repeat input *repeats : keep own
tm flatten input start_dim=0 end_dim=-1 : keep view dim
tm unflatten input dim sizes : keep view dim
tm chunk input chunks dim=0 : keep view items dim
tm split input split_size_or_sections dim=0 : keep view items dim
tm unbind input dim=0 : keep view items
tm narrow input dim start length
tm select input dim index : keep view
tm repeat_interleave input repeats=None dim=None output_size=None : keep own
tm roll input shifts dims=None : keep
tm flip input *dims : keep
tm clone input memory_format=None : keep own shape
tm detach input : keep view shape
m contiguous input memory_format=None
m size input dim=None
m ndim=dim input
m expand_as input other : keep view
m reshape_as/view_as input other : keep view
t zeros_like input dtype=None layout=None device=None requires_grad=False memory_format=None : keep dtype own
t ones_like input dtype=None layout=None device=None requires_grad=False memory_format=None : keep dtype own
t zeros *size dtype=None device=None : dtype own
t arange start end=None step=1 dtype=None device=None : own
t outer input vec2 : own
t view_as_complex input : view
t view_as_real input : view
t polar abs angle
f rms_norm input normalized_shape weight=None eps=None : keep
f layer_norm input normalized_shape weight=None bias=None eps=1e-05 : keep
f normalize input p=2.0 dim=1 eps=1e-12 : float
- argument : dim
- cast : view items shape
- item part index getattr carried : view
- slice : keep view dim
- to_device within : keep view shape
- setitem : keep own
- branch : common holds
- loop call tuple star dict and or : holds
"""

#: Every name of a dtype to one name.
DTYPES = {
    f"torch.{alias}": f"torch.{names.partition('/')[0]}"
    for names in (
        "float32/float float64/double float16/half bfloat16 int64/long int32/int int16/short int8 uint8 bool "
        "complex64/cfloat".split()
    )
    for alias in names.split("/")
}

# Functions of torch whose result does not depend on their arguments alone, or that have side effects.
_IMPURE = frozenset(
    "alpha_dropout bernoulli dropout dropout1d dropout2d dropout3d empty empty_like empty_strided "
    "feature_alpha_dropout fractional_max_pool2d gumbel_softmax manual_seed multinomial normal poisson rand "
    "rand_like randint randint_like randn randn_like randperm rrelu scaled_dot_product_attention save "
    "seed".split()
)
_PURE_BUILTINS = frozenset(
    "abs all any bool dict enumerate float frozenset getattr hasattr id int isinstance issubclass len list "
    "max min range reversed round set slice sorted str sum super tuple type zip".split()
)


_OPERATIONS: dict[tuple[str, str], Operation] = {}
_FLAGGED: defaultdict[str, set[str]] = defaultdict(set)
_DTYPE_OPERAND: dict[str, int] = {}


def _default(text: str) -> Node:
    literal = ast.literal_eval(text)
    return Node("tuple") if literal == () else constant(literal)


def _read(line: str) -> None:
    """Put a line of the table into the operations by place and spelling, and the names of nodes by flag."""
    declared, _, flags = line.partition(" : ")
    places, names, *parameters = declared.split(" ")
    node, _, spellings = names.rpartition("=")
    pairs = [parameter.partition("=") for parameter in parameters]
    operation = Operation(
        node or spellings.partition("/")[0],
        tuple(parameter.lstrip("*") for parameter, _, _ in pairs),
        tuple(_default(text) if sign else None for _, sign, text in pairs),
        next((i for i, (parameter, _, _) in enumerate(pairs) if parameter.startswith("*")), None),
    )
    for place, spelling in product(places, spellings.split("/")):
        _OPERATIONS.setdefault((place, spelling), operation)
    for flag in flags.split():
        _FLAGGED[flag].update([operation.name] if places != "-" else [names, *parameters])
    if "dtype" in flags.split():
        operands = [name for name in operation.parameters if not name.startswith("_")]
        _DTYPE_OPERAND[operation.name] = operands.index("dtype")


for _line in _TABLE.strip().split("\n"):
    _read(_line)
#: Operations with the shape of their first operand.
SAME_SHAPE = _FLAGGED["shape"]


def function(path: str) -> Operation | None:
    """The operation with a full name such as ``torch.mean`` or ``torch.nn.functional.silu``."""
    package, _, name = path.rpartition(".")
    place = {"torch": "t", "torch.nn.functional": "f", "torch.Tensor": "m", "torch.special": "t"}.get(
        package, ""
    )
    return _OPERATIONS.get((place, "sigmoid" if path == "torch.special.expit" else name))


def method(name: str) -> Operation | None:
    """The operation of a tensor's method."""
    return _OPERATIONS.get(("m", name))


def is_pure(path: str) -> bool:
    """Whether a global function is known to have no side effects and to depend on its arguments only."""
    package, _, name = path.rpartition(".")
    if package == "builtins":
        return name in _PURE_BUILTINS
    inside = package == "torch" or package.startswith(
        ("torch.nn.functional", "torch.special", "torch.linalg")
    )
    return inside and name not in _IMPURE and not name.endswith("_") and not name.startswith("set_")


def named_dtype(path: str) -> Node:
    """The node of the dtype with a full name such as ``torch.float32``."""
    return Node("global", (), DTYPES[path])


FLOAT32 = named_dtype("torch.float32")
_INT64 = named_dtype("torch.int64")
#: The flags of operations whose results have one dtype.
_FIXED = {"bool": named_dtype("torch.bool"), "int64": _INT64}
_FLOATS = frozenset(f"torch.{name}" for name in ("float32", "float64", "float16", "bfloat16"))
_DTYPES = frozenset(DTYPES.values())
_NONE = constant(None)
_TRUE = constant(value=True)


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
    if known is not None:
        return known is _TRUE
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
        result = node.op in _FLAGGED["dim"]
    node.facts["dimension"] = _TRUE if result else _NONE
    return result


def _known_dtype(node: Node) -> Node | None:
    """The dtype as a node other than ``dtype(node)``, or None."""
    op = node.op
    position = _DTYPE_OPERAND.get(op)
    item_of = node.args[0].op if op == "item" else ""
    dtype = next((fixed for flag, fixed in _FIXED.items() if op in _FLAGGED[flag]), None)
    if position is not None and node.args[position] != _NONE:
        dtype = node.args[position] if is_dtype(node.args[position]) else None
    elif op == "cast":
        dtype = node.args[1]
    elif op in _FLAGGED["common"]:
        dtype = _common_dtype(node)
    elif item_of in _FLAGGED["parts"]:
        dtype = dtype_of(node.args[0].args[0]) if node.args[1] == constant(0) else _INT64
    elif op in _FLAGGED["keep"] or item_of in _FLAGGED["items"]:
        dtype = dtype_of(node.args[0])
    elif _is_activation(node):
        dtype = dtype_of(node.args[1])
    elif op in _FLAGGED["float"]:
        dtype = dtype_of(node.args[0])
        # No operand after the first may change it.
        kept = all(argument.op in ("constant", "tuple") or is_number(argument) for argument in node.args[1:])
        dtype = dtype if is_float(dtype) and kept else None
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


def is_fresh(node: Node) -> bool:
    """Whether a value has its own memory, which no argument and no attribute can share."""
    if node.op == "branch":
        return is_fresh(node.args[1]) and is_fresh(node.args[2])
    if node.op == "item" and node.args[0].op in _FLAGGED["parts"]:
        return True
    return (
        node.op in _FLAGGED["own"] or "own" in node.facts or (node.op == "carried" and is_fresh(node.args[0]))
    )


def roots(node: Node) -> Iterator[Node]:
    """The values whose memory ``node`` may share, itself included."""
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if current.key in seen:
            continue
        seen.add(current.key)
        if current.op in _FLAGGED["holds"]:
            todo.extend(current.args)
        elif current.op in _FLAGGED["view"]:
            todo.append(current.args[0])
        yield current
