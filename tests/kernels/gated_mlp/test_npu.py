"""The npu kernels on the double of torch_npu's operators, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.kernels.matching import assert_matches
from veomni_hook.kernels.gated_mlp import npu, reference
from veomni_hook.kernels.selection.registry import load_attribute, registry

pytestmark = pytest.mark.usefixtures("operators")

KERNELS = {k.variant: k for k in registry.kernels("gated_mlp") if k.backend == "npu"}
REST = {
    "product": (functional.silu,),
    "product_float32": (functional.silu,),
    "clamped": (functional.silu, 0.7),
    "clamped_after": (functional.silu, 0.7),
    "scaled_sigmoid": (1.7, 0.7),
}
BY_OPERATOR = ["product", "product_float32", "clamped"]


def sides(variant):
    functions = load_attribute(KERNELS[variant].load), getattr(reference, variant)
    return [lambda gate, up, f=f: f(gate, up, *REST[variant]) for f in functions]


def test_every_variant_has_a_kernel():
    assert KERNELS.keys() == registry.ops()["gated_mlp"].variants.keys() == REST.keys()
    assert [variant for variant, kernel in KERNELS.items() if kernel.automatic] == BY_OPERATOR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 0, 8), (6,), (1, 1), (), (1,) * 9], ids=str)
@pytest.mark.parametrize("variant", KERNELS)
def test_equals_the_reference(variant, shape, dtype):
    assert_matches(*sides(variant), [torch.randn(shape).to(dtype) for _ in range(2)])


@pytest.mark.parametrize("variant", BY_OPERATOR)
def test_the_operator_computes_it_both_ways(variant, called):
    assert_matches(*sides(variant), [torch.randn(4, 6) for _ in range(2)])
    assert called == ["npu_swiglu", "npu_swiglu_backward"]


def test_float32_rounds_where_upstream_rounds():
    ours, upstream = sides("product_float32")
    given = [torch.randn(500, 64).bfloat16() for _ in range(2)]
    assert torch.equal(ours(*given), upstream(*given))


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_gradients_only_where_wanted(wanted):
    assert_matches(*sides("product"), [torch.randn(4, 6), torch.randn(4, 6)], wanted)


def test_strides():
    assert_matches(*sides("product"), [torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2]])


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


def test_what_is_kept_is_gate_and_up_once():
    kept = []
    gate, up = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        npu.product(gate, up, functional.silu)
    assert [tuple(x.shape) for x in kept] == [(4, 12)]


@pytest.mark.parametrize("variant", BY_OPERATOR)
def test_compiles_without_a_break(variant):
    ours, upstream = sides(variant)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_matches(compiled, upstream, [torch.randn(4, 6) for _ in range(2)])


def test_the_operators_keep_their_contracts():
    x, dy = torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    torch.library.opcheck(torch.ops.veomni_hook.npu_swiglu.default, (x,))
    torch.library.opcheck(torch.ops.veomni_hook.npu_swiglu_backward.default, (dy, x))


def test_refuses():
    x = torch.randn(2, 3)
    assert npu.refuses(None, x, functional.silu) is None and npu.refuses(None, x, torch.nn.SiLU()) is None
    assert "SiLU" in npu.refuses(None, x, functional.gelu)
    assert "float64" in npu.refuses(None, x.double(), functional.silu)
