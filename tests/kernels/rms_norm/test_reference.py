"""References against the formulas in double precision, and where they round."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.kernels.matching import close
from veomni_hook.kernels.rms_norm import reference
from veomni_hook.kernels.rms_norm.variants import OP
from veomni_hook.kernels.selection.registry import load_attribute, registry

EPS = 1e-2
GROUP = 4


def normal(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def grouped(x: torch.Tensor) -> torch.Tensor:
    return normal(x.unflatten(-1, (-1, GROUP))).flatten(-2)


# Operands after hidden_states, and the formula without any rounding.
FORMULAS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "cast_before_weight": ("w", lambda x, w: w * normal(x)),
    "weight_before_cast": ("w", lambda x, w: w * normal(x)),
    "cast_to_weight": ("w", lambda x, w: w * normal(x)),
    "without_cast": ("w", lambda x, w: w * normal(x)),
    "divided_by_root": ("w", lambda x, w: w * normal(x)),
    "one_plus_weight": ("w", lambda x, w: (1 + w) * normal(x)),
    "one_plus_weight_rounded": ("w", lambda x, w: (1 + w) * normal(x)),
    "one_plus_weight_before_norm": ("w", lambda x, w: normal((1 + w) * x)),
    "one_plus_weight_grouped": ("wn", lambda x, w: (1 + w) * grouped(x)),
    "unweighted": ("", normal),
    "unweighted_rounded_scale": ("", normal),
    "inverse_rms": ("", lambda x: 1 / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()),
    "cast_before_weight_gated": ("gwa", lambda x, g, w: w * normal(x) * functional.silu(g)),
    "weight_before_cast_gated": ("gwa", lambda x, g, w: w * normal(x) * functional.silu(g)),
    "gate_before_norm": ("gw", lambda x, g, w: w * normal(x * functional.silu(g))),
    "gate_before_norm_grouped": ("gwn", lambda x, g, w: w * grouped(x * functional.silu(g))),
}


def call(variant: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    kinds = FORMULAS[variant][0]
    further = [EPS, *([GROUP] if "n" in kinds else []), *([functional.silu] if "a" in kinds else [])]
    return getattr(reference, variant)(*tensors, *further)


def operands(variant: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(2)
    made = [torch.randn(3, 5, 8).to(dtype)]
    for kind in FORMULAS[variant][0]:
        if kind == "g":
            made.append(torch.randn(3, 5, 8).to(dtype))
        elif kind == "w":
            made.append(torch.rand(8).to(weight_dtype))
    return made


def graded(compute: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    result = compute(leaves)
    result.backward(torch.linspace(-1, 1, result.numel()).view(result.shape).to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_every_variant_is_here() -> None:
    assert set(FORMULAS) == set(OP.variants)


@pytest.mark.parametrize("variant", FORMULAS)
def test_values_and_gradients(variant: str) -> None:
    tensors = operands(variant, torch.float32, torch.float32)
    found = graded(lambda leaves: call(variant, leaves), tensors)
    truth = graded(lambda leaves: FORMULAS[variant][1](*leaves), [tensor.double() for tensor in tensors])
    close(found, truth, 3e-6)


@pytest.mark.parametrize("variant", FORMULAS)
def test_the_registry_has_it(variant: str) -> None:
    assert load_attribute(OP.variants[variant].reference) is getattr(reference, variant)
    (kernel,) = [k for k in registry.kernels("rms_norm", variant) if k.backend == "reference"]
    assert not kernel.automatic


PROMOTES = {
    "cast_before_weight", "cast_to_weight", "without_cast", "gate_before_norm", "gate_before_norm_grouped",
}  # fmt: skip


@pytest.mark.parametrize("variant", FORMULAS)
def test_the_dtype_of_the_result(variant: str) -> None:
    result = call(variant, operands(variant, torch.bfloat16, torch.float32))
    assert result.dtype is (torch.float32 if variant in PROMOTES else torch.bfloat16)
    assert call(variant, operands(variant, torch.bfloat16, torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cast_before_weight", "weight_before_cast"),
        ("cast_before_weight", "without_cast"),
        ("one_plus_weight", "one_plus_weight_rounded"),
        ("one_plus_weight", "one_plus_weight_before_norm"),
        ("unweighted", "unweighted_rounded_scale"),
        ("cast_before_weight_gated", "weight_before_cast_gated"),
    ],
)
def test_formulas_that_differ_in_rounding(one: str, other: str) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(64, 96).bfloat16()]
    tensors += [torch.randn(64, 96).bfloat16()] if "gated" in one else []
    tensors += [torch.rand(96).bfloat16()] if "w" in FORMULAS[one][0] else []
    assert not torch.equal(call(one, tensors), call(other, tensors))


def test_a_missing_gate_leaves_the_norm() -> None:
    x, weight = torch.randn(3, 8).bfloat16(), torch.rand(8).bfloat16()
    plain = reference.cast_before_weight(x, weight, EPS)
    assert torch.equal(reference.gate_before_norm(x, None, weight, EPS), plain)
    assert torch.equal(reference.gate_before_norm_grouped(x, None, weight, EPS, 8), plain)
    assert not torch.equal(reference.gate_before_norm_grouped(x, None, weight, EPS, 4), plain)


@pytest.mark.parametrize(
    "variant", ["cast_before_weight", "weight_before_cast", "without_cast", "divided_by_root"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_number_may_stand_for_the_weight(variant, dtype):
    # Some models scale by a number; where their text casts no weight, nothing of ours may ask for a tensor.
    x, run = torch.randn(3, 8).to(dtype), getattr(reference, variant)
    assert torch.equal(run(x, 1.5, EPS), run(x, torch.full((8,), 1.5, dtype=dtype), EPS))
