"""References against upstream's classes, bit by bit."""

from importlib import import_module
from typing import Any

import pytest
import torch

from tests.kernels.contract import DTYPES, call_of
from tests.kernels.layer_norm.cases import EPS
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.layer_norm import operand_checks
from veomni_hook.kernels.layer_norm.variants import OP
from veomni_hook.kernels.slot.arguments import operand_names

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


def test_every_variant_is_here():
    assert set(UPSTREAM) == set(OP.variants)


@pytest.mark.parametrize("variant", UPSTREAM)
def test_operands_are_in_the_order_that_the_checks_take(variant):
    first, *names = operand_names("layer_norm", variant)
    order = [name for name in ("normalized_shape", "weight", "bias", "eps") if name in names]
    assert (first, names) == ("hidden_states", order)
    assert ("normalized_shape" in names) == (variant in operand_checks._SHAPED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", UPSTREAM)
def test_has_upstreams_bits(variant, dtype):
    module = upstream(variant, 48)
    if module is None:
        pytest.skip("this release has no class with the formula")
    assert_has_bits(module, call(variant, ((3, 5, 48), 1), dtype))


def call(variant, *of):
    return call_of("layer_norm", variant, "torch", *of)


def assert_has_bits(module, call):
    def functional(hidden_states, *parameters):
        named = dict(zip(("weight", "bias"), parameters, strict=False))
        return torch.func.functional_call(module, named, hidden_states)

    assert_matches(call.theirs, functional, call.tensors, exact=True)


@pytest.mark.parametrize("variant", ["weight_before_cast", "operator_before_weight_and_bias"])
def test_has_upstreams_bits_with_a_weight_for_each_head(variant):
    assert_has_bits(upstream(variant, (4, 16)), call(variant, ((2, 5, 4, 16), 2)))


@pytest.mark.parametrize("variant", UPSTREAM)
def test_in_double_precision(variant):
    made = call(variant, ((7, 24), 1))
    x, *parameters = made.tensors
    truth = x.double()
    truth = (truth - truth.mean(-1, keepdim=True)) / (
        truth.var(-1, unbiased=False, keepdim=True) + EPS
    ).sqrt()
    for parameter, combine in zip(parameters, (torch.mul, torch.add), strict=False):
        truth = combine(truth, parameter.double())
    found = made.theirs(x, *parameters)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)
