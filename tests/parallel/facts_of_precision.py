"""Gradients of split models in float32 and float64: whether what differs from one process is rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.parallel import small
from tests.parallel.facts_of_sequence import gradients


class Wide(TorchFunctionMode):
    """Casts to float32, of which layers have some, are casts to float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        named = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return function(*wide, **named)


def facts(family: str, batch: str, length: int) -> dict[str, Any]:
    """Return how far gradients are from those of one process in float64, relative to the norm of each.

    The decays are those of upstream's initialisation, with which a state is soon forgotten.
    """
    model = small.model(family, "eager")
    model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, 1.0, 16.0).data.log_()
    given = small.batch(batch, length)
    found = {("32", sizes): gradients(model, sizes, lambda: model(**given).loss) for sizes in ("", "sp=2")}
    model.double()
    with Wide():
        found |= {
            ("64", sizes): gradients(model, sizes, lambda: model(**given).loss) for sizes in ("", "sp=2")
        }
    told = {}
    for name, exact in found["64", ""].items():
        whole, split = found["32", ""][name].double(), found["32", "sp=2"][name].double()
        norm = exact.norm()
        told[name] = {
            "norm": float(norm),
            "float64": float((found["64", "sp=2"][name] - exact).norm() / norm),
            "whole": float((whole - exact).norm() / norm),
            "split": float((split - exact).norm() / norm),
        }
    return {"tensors": told, "dtypes": sorted({str(each.dtype) for each in found["64", "sp=2"].values()})}
