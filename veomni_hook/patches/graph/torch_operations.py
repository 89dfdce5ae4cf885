"""The torch operations that the canonical form knows: names, parameters, defaults.

An operation has one name here, whether upstream writes it as a function of torch, as one of
torch.nn.functional, or as a method. Everything else is an opaque call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

__all__ = ["DTYPES", "Operation", "function", "is_pure", "method"]


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
