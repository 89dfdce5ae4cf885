"""Both sides of the variants, operands for them, and upstream's modules that compute them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from tests.kernels import declared
from veomni_hook.kernels.slot.arguments import operand_names

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: A class of upstream's for each variant.
UPSTREAM = {
    "weight_before_cast": "cohere.modeling_cohere:CohereLayerNorm",
    "cast_before_weight_and_bias": "deberta.modeling_deberta:DebertaLayerNorm",
    "operator_before_weight_and_bias": "chameleon.modeling_chameleon:ChameleonLayerNorm",
    "weight_and_bias_before_cast": "esmfold2.modeling_esmfold2:EsmFold2LayerNorm",
    "unweighted": "olmo.modeling_olmo:OlmoLayerNorm",
}


def upstream(variant: str, size: int | tuple[int, ...]) -> torch.nn.Module | None:
    """The module of a variant, in float32, or None where this release has none; Chameleon's takes a tuple."""
    module, _, name = UPSTREAM[variant].partition(":")
    try:
        kind: Any = getattr(import_module(f"transformers.models.{module}"), name)
    except ImportError:
        return None
    if name == "ChameleonLayerNorm" and isinstance(size, int):
        size = (size,)
    made: torch.nn.Module = kind(size) if name == "OlmoLayerNorm" else kind(size, eps=EPS)
    return made


def pair(backend: str, variant: str, width: int) -> list[Callable[..., torch.Tensor]]:
    """The kernel of a backend and the reference of a variant for rows of ``width``, of the tensors alone."""
    named: dict[str, Any] = {"eps": EPS, "normalized_shape": (width,)}
    names = operand_names("layer_norm", variant)

    def of_tensors(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        given = iter(tensors)
        return function(*(named[name] if name in named else next(given) for name in names))

    return [partial(of_tensors, each) for each in declared.pair("layer_norm", variant, backend)]


def inputs(
    variant: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parameter_dtype: torch.dtype | None = None,
    *,
    groups: bool = False,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Operands that are tensors; with ``groups``, the parameters have the last two dimensions of ``shape``."""
    made = [(torch.randn(shape) + 0.5).to(device, dtype)]
    if variant == "weight_and_bias_before_cast":
        parameter_dtype = torch.float32  # all that upstream's operator takes
    for name in ("weight", "bias"):
        if name in operand_names("layer_norm", variant):
            parameter = torch.rand(shape[-2:] if groups else shape[-1:]) + (0.5 if name == "weight" else -0.5)
            made.append(parameter.to(device, parameter_dtype or dtype))
    return made
