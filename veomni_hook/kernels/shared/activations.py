"""Identifies the activation that a model's module or function computes, by a name that kernels know.

Nothing is called. A module counts as what its class computes only if neither its state nor hooks change that.
Classes of transformers are identified by name, so transformers need not be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import pi, sqrt
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from veomni_hook.kernels.shared.module_calls import call_is_seen, has_code, is_as_written, place_of
from veomni_hook.kernels.shared.origin import written_in
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing

__all__ = ["FUNCTIONS", "POWERS", "name_of", "name_of_accepted", "unknown", "widened"]


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.square(functional.relu(x))


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh_cubed(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(sqrt(2.0 / pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_tanh_factored(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


#: The known names, with functions that round exactly as upstream's do.
FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu_squared": _relu_squared,
    "sigmoid": torch.sigmoid,
    "quick_gelu": _quick_gelu,
    "gelu_tanh_cubed": _gelu_tanh_cubed,
    "gelu_tanh_factored": _gelu_tanh_factored,
}

#: Those with a power: autocast on CUDA computes it in float32, and so is the result.
POWERS = frozenset(("gelu_tanh_cubed", "relu_squared"))

# For calls with one argument, as in gated products.
_BY_FUNCTION: dict[Any, str] = {
    functional.silu: "silu",
    functional.gelu: "gelu",
    functional.relu: "relu",
    torch.relu: "relu",
    torch.sigmoid: "sigmoid",
    functional.sigmoid: "sigmoid",
    torch.Tensor.sigmoid: "sigmoid",
    _relu_squared: "relu_squared",
    _quick_gelu: "quick_gelu",
    _gelu_tanh_cubed: "gelu_tanh_cubed",
    _gelu_tanh_factored: "gelu_tanh_factored",
}
_BY_CLASS = {
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("torch.nn.modules.activation", "GELU"): "gelu",
    ("torch.nn.modules.activation", "ReLU"): "relu",
    ("torch.nn.modules.activation", "Sigmoid"): "sigmoid",
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
    ("transformers.activations", "PytorchGELUTanh"): "gelu_tanh",
    ("transformers.activations", "NewGELUActivation"): "gelu_tanh_cubed",
    ("transformers.activations", "FastGELUActivation"): "gelu_tanh_factored",
    ("transformers.activations", "QuickGELUActivation"): "quick_gelu",
    ("transformers.activations", "ReLUSquaredActivation"): "relu_squared",
}
_KNOWN: dict[type, tuple[str, str]] = {}
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def name_of(activation: Any) -> str | None:
    """Return the name in `FUNCTIONS` of what ``activation`` computes, or None."""
    if isinstance(activation, nn.Module):
        known = _known(type(activation))
        if known is None or not has_code(type(activation), known[1]) or _changed(activation) is not None:
            return None
        return _said(activation, known[0])
    if type(activation) is partial:
        keywords = activation.keywords
        if activation.func is functional.gelu and not activation.args and [*keywords] == ["approximate"]:
            return _GELUS.get(keywords["approximate"])
        return None
    try:
        return _BY_FUNCTION.get(activation)
    except TypeError:
        return None  # unhashable, so not a known function


def widened(x: torch.Tensor) -> bool:
    """Return whether upstream computes `POWERS` of ``x`` in float32 now, whatever its dtype."""
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def name_of_accepted(activation: Any) -> str | None:
    """`name_of` what it has named in the same call of the model; skips what it has checked."""
    if not isinstance(activation, nn.Module):
        return name_of(activation)
    known = _known(type(activation))
    return None if known is None else _said(activation, known[0])


@answered_while_tracing
def _known(kind: type[nn.Module]) -> tuple[str, str] | None:
    """Return the name of what a known activation class computes, and where its forward's code is stored."""
    known = _KNOWN.get(kind)
    if known is None:
        name = _BY_CLASS.get((kind.__module__, kind.__name__))
        if name is not None and (place := place_of(kind)):
            known = _KNOWN[kind] = (name, place)
    return known


def unknown(activation: Any, known: str = "") -> str:
    """Return why `name_of` has no name for ``activation``, or a name that is not in ``known``."""
    changed = _changed(activation) if isinstance(activation, nn.Module) else None
    kind = type(activation)
    if changed is None and (kind.__module__, kind.__name__) in _BY_CLASS and not is_as_written(kind):
        changed = f"the forward of {kind.__name__} was replaced by {'.'.join(written_in(kind.forward))}"
    named = getattr(activation, "__name__", kind.__name__)
    return changed or f"the activation {named} is not supported" + (f", only {known}" if known else "")


def _said(activation: nn.Module, name: str) -> str | None:
    """Return the name for an instance of a known class, considering its constructor arguments."""
    attributes = activation.__dict__
    if "approximate" in attributes:
        return _GELUS.get(attributes["approximate"])
    act = attributes.get("act")
    # transformers' Python version rounds after every step; the module stores it as a method.
    return name if act is None or name_of(act) == name else None


def _changed(activation: nn.Module) -> str | None:
    """Return what a call of the module does besides its class's computation, or None."""
    if activation.__dict__.get("inplace"):
        return "the activation modifies its input in place"
    seen = call_is_seen(activation)
    return None if seen is None else f"the activation {seen}, which a fused kernel would skip"
