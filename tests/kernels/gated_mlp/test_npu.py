"""The npu kernels on the double of torch_npu's operators, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.kernels import declared
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.gated_mlp import npu
from veomni_hook.kernels.selection.registry import registry

pytestmark = pytest.mark.usefixtures("operators")

KERNELS = declared.kernels("gated_mlp", "npu")
REST = {
    "product": (functional.silu,),
    "product_float32": (functional.silu,),
    "clamped": (functional.silu, 0.7),
    "clamped_after": (functional.silu, 0.7),
    "scaled_sigmoid": (1.7, 0.7),
}
BY_OPERATOR = ["product", "product_float32", "clamped"]


def sides(variant):
    functions = declared.pair("gated_mlp", variant, "npu")
    return [lambda gate, up, f=f: f(gate, up, *REST[variant]) for f in functions]


def test_every_variant_has_a_kernel():
    assert KERNELS.keys() == registry.ops()["gated_mlp"].variants.keys() == REST.keys()
    assert [variant for variant, kernel in KERNELS.items() if kernel.automatic] == BY_OPERATOR


@pytest.mark.parametrize("variant", BY_OPERATOR)
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
