"""The npu kernels on the double of torch_npu's operators, against the reference."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.contract import call_of
from veomni_hook.kernels.gated_mlp import npu

pytestmark = pytest.mark.usefixtures("operators")


def call(variant, *of, **changed):
    return call_of("gated_mlp", variant, "npu", *of, **changed)


@pytest.mark.parametrize("variant", ["product", "product_float32", "clamped"])
def test_the_operator_computes_it_both_ways(variant, called):
    call(variant, (4, 6)).matches()
    assert called == ["npu_swiglu", "npu_swiglu_backward"]


def test_float32_rounds_where_upstream_rounds():
    made = call("product_float32", (500, 64), torch.bfloat16)
    assert torch.equal(made.ours(*made.tensors), made.theirs(*made.tensors))


@pytest.mark.parametrize(
    "change",
    [
        {"up": torch.Tensor.bfloat16},
        {"up": lambda up: up[:1]},
        dict.fromkeys(("gate", "up"), torch.Tensor.double),
    ],
    ids=["dtypes", "shapes", "float64"],
)
def test_what_does_not_fit_is_computed_upstreams_way(change, called):
    call("product", (3, 4), **change).matches(exact=True)
    assert not called


def test_refuses():
    x = torch.randn(2, 3)
    assert npu.refuses(None, x, functional.silu) is None and npu.refuses(None, x, torch.nn.SiLU()) is None
    assert "SiLU" in npu.refuses(None, x, functional.gelu)
    assert "float64" in npu.refuses(None, x.double(), functional.silu)
