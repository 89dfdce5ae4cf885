"""The backends of experts with stacked weights, and on what each is tested; `test_backends` is their contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import pytest
import torch

from tests.kernels import declared
from tests.kernels.matching import DEVICE, assert_matches
from tests.kernels.moe_experts.formulas import CASES, inputs
from veomni_hook.kernels.selection.declaration import Kernel
from veomni_hook.kernels.selection.registry import load_attribute

#: Every way of storing weights, every order of gates and ups, with biases and without.
LAYOUTS = ["gated", "gated_transposed", "biased_interleaved_alpha_gated", "ungated"]
#: The plainest of them and the oddest: what Triton's interpreter does by default.
SOME_LAYOUTS = {"gated", "biased_interleaved_alpha_gated"}
#: Of the torch backend, with any function of tensors between or after the products.
COMPOSED = {"gated_jointly", "gated_normalised"}


class Backend:
    """A backend, and its variants on the device that it is tested on.

    Attributes:
        name: of the backend.
        dtypes: that its products may have, as far as the device computes them rightly.
        device: of operands.
        low: the dtype that autocast is tested with.
    """

    def __init__(
        self, name: str, dtypes: list[torch.dtype], device: str = "cpu", low: torch.dtype = torch.bfloat16
    ) -> None:
        self.name, self.dtypes, self.device, self.low = name, dtypes, device, low

    @cached_property
    def declared(self) -> dict[str, Kernel]:
        """Its kernels by variant."""
        return declared.kernels("moe_experts", self.name)

    @cached_property
    def stacked(self) -> list[str]:
        """Its variants that the formulas of the tests have, too."""
        return [variant for variant in self.declared if variant in CASES]

    def operands(self, name: str, *args: Any, **options: Any) -> list[torch.Tensor]:
        """Random operands of a variant, those that are tensors."""
        return [each.to(self.device) for each in inputs(CASES[name], *args, **options)]

    def side(self, name: str, *changed: Any) -> Callable[..., torch.Tensor]:
        """The kernel of a variant as a function of what is a tensor."""
        return self.sides(name, *changed)[0]

    def sides(self, name: str, *changed: Any) -> list[Callable[..., torch.Tensor]]:
        """The kernel and the reference."""
        rest = changed or CASES[name].rest
        functions = declared.pair("moe_experts", name, self.name)
        return [lambda *operands, f=f: f(*operands, *rest) for f in functions]  # type: ignore[misc]

    def refusal(self, name: str, operands: list[Any], *rest: Any, owner: Any = None) -> str | None:
        """Why the kernel of a variant does not take these operands."""
        return load_attribute(self.declared[name].refuses)(owner, *operands, *(rest or CASES[name].rest))

    def assert_same(self, name: str, operands: list[torch.Tensor], **options: Any) -> None:
        """Results and gradients are those of the reference."""
        assert self.refusal(name, operands) is None
        assert_matches(*self.sides(name), operands, **options)


BACKENDS = {
    "torch": Backend("torch", [torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    # The interpreter is wrong for products of bfloat16.
    "triton": Backend(
        "triton",
        [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])],
        DEVICE,
        torch.float16,
    ),
    # On the double of torch_npu's operators.
    "npu": Backend("npu", [torch.float32, torch.float16, torch.bfloat16]),
}


def every(
    of: Callable[[Backend], Iterator[str] | list[str]],
    *,
    soon: Callable[[str], bool] | None = None,
    of_all: bool = False,
) -> Any:
    """A matrix of backends and the variants that ``of`` gives; ``soon`` names Triton's of the default suite.

    With ``of_all`` it names those of all backends.
    """
    found = []
    for backend in BACKENDS.values():
        for name in of(backend):
            late = (of_all or backend.name == "triton") and soon is not None and not soon(name)
            found.append(pytest.param(backend.name, name, marks=[pytest.mark.slow] if late else []))
    return pytest.mark.parametrize(("backend", "name"), found, indirect=["backend"])
