"""Norms of torch's class with the parameters that it may have, and calls of kernels with these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.kernels.matching import DEVICE

EPS = 1e-3
#: Whether there is a weight, and a bias.
FORMS = {"weight and bias": (True, True), "weight": (True, False), "neither": (False, False)}


def inputs(
    form: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    count: int = 1,
    parameters: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """``count`` tensors of the shape, then the parameters of the form."""
    rows = [(torch.randn(shape) + 0.5).to(DEVICE, dtype) for _ in range(count)]
    weight, bias = torch.rand(shape[-1]) + 0.5, torch.rand(shape[-1]) - 0.5
    kept = [each for each, exists in zip((weight, bias), FORMS[form], strict=True) if exists]
    return [*rows, *(each.to(DEVICE, parameters or dtype) for each in kept)]


def of_tensors(kernel: Callable[..., Any], form: str, width: int, eps: float = EPS) -> Callable[..., Any]:
    """``kernel`` as a function of tensors: its rows, then the parameters of the form."""
    weighted, biased = FORMS[form]
    norm = nn.LayerNorm(width, eps, elementwise_affine=weighted, bias=biased)

    def call(*tensors: torch.Tensor) -> Any:
        parameters = list(tensors[len(tensors) - weighted - biased :])
        # As plain tensors, so that what is computed has their gradients.
        norm._parameters.update(dict(zip(("weight", "bias"), parameters, strict=False)))
        return kernel(*tensors[: len(tensors) - len(parameters)], norm)

    return call
