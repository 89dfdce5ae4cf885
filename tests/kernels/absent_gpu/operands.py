"""What calls of Triton's kernels are made of, with operands whose numbers do not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.kernels import declared
from veomni_hook.kernels.selection.registry import load_attribute

Tensor = torch.Tensor
#: What is called, and how it is named.
Call = tuple[str, Callable[[], Any]]

BF16, F32 = torch.bfloat16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Zeros: every value is a valid one, also of an index."""
    return torch.zeros(shape, dtype=dtype)


def both_ways(
    function: Callable[..., Any], leaves: Sequence[Tensor], wanted: Sequence[bool] | None = None
) -> None:
    """Call ``function`` and go back through what it returns, to all leaves that may have gradients or are ``wanted``."""
    wanted = wanted or [leaf.is_floating_point() for leaf in leaves]
    given = [leaf.detach().requires_grad_(want) for leaf, want in zip(leaves, wanted, strict=True)]
    results = function(*given)
    results = [each for each in (results if isinstance(results, tuple) else (results,)) if each is not None]
    differentiable = [each for each in results if each.requires_grad]
    torch.autograd.backward(differentiable, [torch.zeros_like(each) for each in differentiable])


def kernels_of(op: str) -> dict[str, Callable[..., Any]]:
    """The op's Triton kernels, by variant."""
    return {variant: load_attribute(k.load) for variant, k in declared.kernels(op, "triton").items()}
