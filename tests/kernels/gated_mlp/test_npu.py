"""The npu kernels on the double of torch_npu's operators, against the reference."""

import pytest
import torch
from torch.nn import functional

from tests.kernels import declared
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.gated_mlp import npu

pytestmark = pytest.mark.usefixtures("operators")

#: The variants that the operator computes, and what follows gate and up.
REST = {
    "product": (functional.silu,),
    "product_float32": (functional.silu,),
    "clamped": (functional.silu, 0.7),
}


def sides(variant):
    functions = declared.pair("gated_mlp", variant, "npu")
    return [lambda gate, up, f=f: f(gate, up, *REST[variant]) for f in functions]


@pytest.mark.parametrize("variant", REST)
def test_the_operator_computes_it_both_ways(variant, called):
    assert_matches(*sides(variant), [torch.randn(4, 6) for _ in range(2)])
    assert called == ["npu_swiglu", "npu_swiglu_backward"]


def test_float32_rounds_where_upstream_rounds():
    ours, upstream = sides("product_float32")
    given = [torch.randn(500, 64).bfloat16() for _ in range(2)]
    assert torch.equal(ours(*given), upstream(*given))


@pytest.mark.parametrize(
    "given",
    [
        [torch.randn(3, 4), torch.randn(3, 4).bfloat16()],
        [torch.randn(3, 4), torch.randn(1, 4)],
        [torch.randn(3, 4).double(), torch.randn(3, 4).double()],
    ],
    ids=["dtypes", "shapes", "float64"],
)
def test_what_does_not_fit_is_computed_upstreams_way(given, called):
    assert_matches(*sides("product"), given, exact=True)
    assert not called


def test_refuses():
    x = torch.randn(2, 3)
    assert npu.refuses(None, x, functional.silu) is None and npu.refuses(None, x, torch.nn.SiLU()) is None
    assert "SiLU" in npu.refuses(None, x, functional.gelu)
    assert "float64" in npu.refuses(None, x.double(), functional.silu)
