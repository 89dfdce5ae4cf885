"""References against upstream's classes, bit by bit."""

import pytest
import torch

from tests.kernels.layer_norm.variants import DTYPES, EPS, UPSTREAM, inputs, pair, upstream
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.layer_norm import operand_checks
from veomni_hook.kernels.layer_norm.variants import OP
from veomni_hook.kernels.slot.arguments import operand_names


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

    def functional(hidden_states, *parameters):
        named = dict(zip(("weight", "bias"), parameters, strict=False))
        return torch.func.functional_call(module, named, hidden_states)

    assert_matches(
        pair("reference", variant, 48)[1], functional, inputs(variant, (3, 5, 48), dtype), exact=True
    )


@pytest.mark.parametrize("variant", ["weight_before_cast", "operator_before_weight_and_bias"])
def test_has_upstreams_bits_with_a_weight_for_each_head(variant):
    module = upstream(variant, (4, 16))
    tensors = inputs(variant, (2, 5, 4, 16), torch.float32, groups=True)

    def functional(hidden_states, *parameters):
        named = dict(zip(("weight", "bias"), parameters, strict=False))
        return torch.func.functional_call(module, named, hidden_states)

    assert_matches(pair("reference", variant, 16)[1], functional, tensors, exact=True)


@pytest.mark.parametrize("variant", UPSTREAM)
def test_in_double_precision(variant):
    x, *parameters = inputs(variant, (7, 24), torch.float32)
    truth = x.double()
    truth = (truth - truth.mean(-1, keepdim=True)) / (
        truth.var(-1, unbiased=False, keepdim=True) + EPS
    ).sqrt()
    for parameter, combine in zip(parameters, (torch.mul, torch.add), strict=False):
        truth = combine(truth, parameter.double())
    found = pair("reference", variant, 24)[1](x, *parameters)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)
