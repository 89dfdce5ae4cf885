"""The torch operations that the canonical form knows, and what is known about their results.

An operation has one name here, whether upstream writes it as a function of torch, as one of
torch.nn.functional, or as a method. Everything else is an opaque call.

Two assumptions about upstream code: float32 arithmetic has no wider operand (no float64 or complex numbers
unless the code names them), and the tensors that a function gets have at least one dimension. Float32 then
promotes every other operand, and the canonical form contains this cast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
    "is_number",
    "is_pure",
    "method",
    "named_dtype",
]


@dataclass(frozen=True, slots=True)
class Operation:
    """Parameters of an operation: names, and defaults as Python values in source form (None: required).

    ``variadic`` is the number of the parameter that a method also accepts as separate arguments.
    """

    name: str
    parameters: tuple[str, ...]
    defaults: tuple[str | None, ...]
    variadic: int | None = None


# t: torch.<name>, f: torch.nn.functional.<name>, m: Tensor.<name>. A star marks a parameter that a method
# also accepts as separate arguments. Names separated by a slash are the same operation.
_TABLE = """
tm mul/multiply input other
tm sub/subtract input other alpha=1
tm add input other alpha=1
tm div/divide input other rounding_mode=None
tm floor_divide input other
tm remainder input other
tm neg/negative input
tm pow input exponent
tm square input
tm sqrt input
tm rsqrt input
tm reciprocal input
tm abs/absolute input
tm exp input
tm log input
tm log1p input
tm sin input
tm cos input
tm erf input
tm floor input
tm round input decimals=0
tm sign input
tmf sigmoid input
tmf tanh input
tm relu input
f relu input inplace=False
f silu input inplace=False
f gelu input approximate='none'
f softplus input beta=1 threshold=20
tm maximum input other
tm minimum input other
tm clamp/clip input min=None max=None
tm clamp_min input min
tm clamp_max input max
tm mean input dim=None keepdim=False dtype=None
tm sum input dim=None keepdim=False dtype=None
tm amax input dim=() keepdim=False
tm amin input dim=() keepdim=False
tm argmax input dim=None keepdim=False
tm topk input k dim=-1 largest=True sorted=True
tm sort input dim=-1 descending=False
tm argsort input dim=-1 descending=False
tm cumsum input dim dtype=None
tm gather input dim index
tm scatter input dim index src
tm scatter_add input dim index src
tm index_add input dim index source alpha=1
tm index_select input dim index
tm masked_fill input mask value
tm masked_select input mask
tm nonzero input as_tuple=False
tm eq input other
tm ne/not_equal input other
tm lt/less input other
tm le/less_equal input other
tm gt/greater input other
tm ge/greater_equal input other
tm logical_not input
tm logical_and input other
tm logical_or input other
t where condition input=() other=()
f one_hot tensor num_classes=-1
f linear input weight bias=None
f softmax input dim=None _stacklevel=3 dtype=None
tm softmax input dim dtype=None
f log_softmax input dim=None _stacklevel=3 dtype=None
tm matmul input other
tm mm input other
tm bmm input mat2
t einsum equation operands
t cat/concat/concatenate tensors dim=0
t stack tensors dim=0
tm unsqueeze input dim
tm squeeze input dim=()
tm transpose/swapaxes/swapdims input dim0 dim1
tm t input
m permute input *dims
t permute input dims
m view input *shape
m reshape input *shape
t reshape input shape
m expand input *shape
m repeat input *repeats
tm flatten input start_dim=0 end_dim=-1
tm unflatten input dim sizes
tm chunk input chunks dim=0
tm split input split_size_or_sections dim=0
tm unbind input dim=0
tm narrow input dim start length
tm select input dim index
tm repeat_interleave input repeats=None dim=None output_size=None
tm roll input shifts dims=None
tm flip input *dims
tm clone input memory_format=None
tm detach input
m contiguous input memory_format=None
m size input dim=None
m dim input
m expand_as input other
m view_as input other
m reshape_as input other
t zeros_like input dtype=None layout=None device=None requires_grad=False memory_format=None
t ones_like input dtype=None layout=None device=None requires_grad=False memory_format=None
t zeros *size dtype=None device=None
t arange start end=None step=1 dtype=None device=None
t outer input vec2
t view_as_complex input
t view_as_real input
t polar abs angle
f rms_norm input normalized_shape weight=None eps=None
f layer_norm input normalized_shape weight=None bias=None eps=1e-05
f normalize input p=2.0 dim=1 eps=1e-12
"""

# Operations that are special cases of another one.
_SPECIAL_CASES = {"mm": "matmul"}

#: Every name of a dtype to one name.
DTYPES = {
    f"torch.{alias}": f"torch.{name}"
    for name, aliases in {
        "float32": "float32 float",
        "float64": "float64 double",
        "float16": "float16 half",
        "bfloat16": "bfloat16",
        "int64": "int64 long",
        "int32": "int32 int",
        "int16": "int16 short",
        "int8": "int8",
        "uint8": "uint8",
        "bool": "bool",
        "complex64": "complex64 cfloat",
    }.items()
    for alias in aliases.split()
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


@cache
def _table() -> dict[tuple[str, str], Operation]:
    table: dict[tuple[str, str], Operation] = {}
    for line in _TABLE.split("\n"):
        if not line:
            continue
        places, names, *parameters = line.split(" ")
        pairs = [parameter.partition("=") for parameter in parameters]
        name, *aliases = names.split("/")
        canonical = _SPECIAL_CASES.get(name, name)
        operation = Operation(
            canonical,
            tuple(parameter.lstrip("*") for parameter, _, _ in pairs),
            tuple(default if sign else None for _, sign, default in pairs),
            next((i for i, (parameter, _, _) in enumerate(pairs) if parameter.startswith("*")), None),
        )
        for place in places:
            for spelling in (name, *aliases):
                table.setdefault((place, spelling), operation)
    return table


def function(path: str) -> Operation | None:
    """The operation with a full name such as ``torch.mean`` or ``torch.nn.functional.silu``."""
    package, _, name = path.rpartition(".")
    place = {"torch": "t", "torch.nn.functional": "f", "torch.Tensor": "m", "torch.special": "t"}.get(package)
    if package == "torch.special" and name == "expit":
        name = "sigmoid"
    return _table().get((place, name)) if place is not None else None


def method(name: str) -> Operation | None:
    """The operation of a tensor's method."""
    return _table().get(("m", name))


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
