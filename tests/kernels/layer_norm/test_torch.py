"""The kernels in PyTorch: its operator for two formulas; the others are recomputed."""

import pytest
import torch

from tests.kernels.contract import call_of
from tests.kernels.layer_norm.cases import EPS
from veomni_hook.kernels.layer_norm import torch as kernels

OPERATOR = ["weight_before_cast", "unweighted"]


@pytest.mark.parametrize("variant", OPERATOR)
def test_autocast_changes_no_dtype(variant, monkeypatch):
    call = call_of("layer_norm", variant, "torch", ((5, 16), 1), torch.bfloat16)
    operator = torch.nn.functional.layer_norm

    def as_on_a_gpu(x, shape, weight, *others):
        return operator(x.float(), shape, None if weight is None else weight.float(), *others)

    expected = call.theirs(*call.tensors)
    monkeypatch.setattr(torch.nn.functional, "layer_norm", as_on_a_gpu)
    assert call.ours(*call.tensors).dtype is expected.dtype


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.rand(3, 8), "one weight for all groups"),
        (torch.rand(8).bfloat16(), "the weight has dtype torch.bfloat16"),
        (torch.rand(7), "does not match"),
    ],
)
def test_refuses(weight, reason):
    rule = kernels.refuses("weight_before_cast")
    assert rule(None, torch.randn(2, 3, 8), torch.rand(8), EPS) is None
    assert reason in rule(None, torch.randn(2, 3, 8), weight, EPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_refuses_a_gradient_that_is_summed_in_16_bits(dtype):
    rule, x, weight = (
        kernels.refuses("weight_before_cast"),
        torch.randn(2, 8).to(dtype),
        torch.rand(8).to(dtype),
    )
    assert rule(None, x, weight, EPS) is None
    assert "in 16 bits" in rule(None, x, weight.requires_grad_(), EPS)
    with torch.no_grad():
        assert rule(None, x, weight, EPS) is None
    assert rule(None, x.float(), weight.detach().float().requires_grad_(), EPS) is None
