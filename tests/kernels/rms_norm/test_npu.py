"""The npu kernels on the double of torch_npu's operators, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import declared
from tests.kernels.matching import assert_matches
from tests.kernels.rms_norm.variants import DTYPES, EPS, inputs, pair
from veomni_hook.kernels.rms_norm import npu
from veomni_hook.kernels.selection.registry import registry

pytestmark = pytest.mark.usefixtures("operators")

KERNELS = declared.kernels("rms_norm", "npu")
BY_OPERATOR = [variant for variant, kernel in KERNELS.items() if kernel.automatic]


def test_every_variant_has_a_kernel():
    assert KERNELS.keys() == registry.ops()["rms_norm"].variants.keys()
    assert set(KERNELS) - set(BY_OPERATOR) == {"without_cast", "unweighted_rounded_scale", "inverse_rms"}


@pytest.mark.sample(32)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 0, 8), (6,), (2, 1, 1, 1, 1, 1, 1, 2, 4)], ids=str)
@pytest.mark.parametrize("variant", KERNELS)
def test_equals_the_reference(variant, shape, dtype):
    if variant == "one_plus_weight_grouped" and 0 in shape:
        pytest.skip("upstream's code cannot make groups of nothing")
    assert_matches(*pair("npu", variant, shape[-1]), inputs(variant, shape, dtype))


@pytest.mark.parametrize("variant", BY_OPERATOR)
def test_the_operator_computes_it_both_ways(variant, called):
    assert_matches(*pair("npu", variant, 6), inputs(variant, (4, 6), torch.bfloat16))
    assert called == ["npu_rms_norm", "npu_rms_norm_backward"]


@pytest.mark.parametrize(
    "variant",
    ["weight_before_cast", "one_plus_weight", "one_plus_weight_rounded", "unweighted", "gate_before_norm"],
)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_rounds_where_upstream_rounds(variant, dtype):
    """All of it is in float32 up to one rounding, or the operator's factor is 1."""
    ours, reference = pair("npu", variant)
    given = inputs(variant, (400, 96), dtype)
    apart = ours(*given) != reference(*given)
    assert apart.float().mean() < 1e-3


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("variant", [v for v in BY_OPERATOR if not v.startswith("unweighted")])
def test_weights_of_another_dtype(variant, dtypes):
    assert_matches(*pair("npu", variant, 6), inputs(variant, (5, 6), *dtypes))


@pytest.mark.parametrize("variant", BY_OPERATOR)
def test_strides(variant):
    given = [x.t().contiguous().t() if x.ndim == 2 else torch.stack((x, x), 1)[:, 0] for x in
             inputs(variant, (6, 10), torch.float32)]  # fmt: skip
    assert not any(x.is_contiguous() for x in given)
    assert_matches(*pair("npu", variant, 10), given)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_gradients_only_where_wanted(wanted):
    ours, reference = pair("npu", "cast_before_weight")
    assert_matches(ours, reference, [torch.randn(4, 9), torch.rand(9)], wanted)


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", BY_OPERATOR)
def test_compiles_without_a_break(variant):
    ours, reference = pair("npu", variant, 8)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_matches(compiled, reference, inputs(variant, (5, 8), torch.float32))


def test_the_operators_keep_their_contracts():
    x, weight, dy = torch.randn(3, 2, 4), torch.rand(4), torch.randn(3, 2, 4)
    ops = torch.ops.veomni_hook
    torch.library.opcheck(ops.npu_rms_norm.default, (x, weight, EPS))
    scale = ops.npu_rms_norm(x, weight, EPS)[1]
    torch.library.opcheck(ops.npu_rms_norm_backward.default, (dy, x, weight, scale))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_states": torch.randn(2, 8, dtype=torch.float64)}, "float64"),
        ({"weight": torch.rand(8, dtype=torch.float64)}, "float64"),
        ({"weight": torch.rand(4)}, "does not match"),
        ({"weight": torch.rand(8, device="meta")}, "operands are on cpu and meta"),
        ({"eps": torch.ones(())}, "eps is a Tensor"),
        ({"hidden_states": torch.randn(())}, "no dimension"),
        (
            {"hidden_states": torch.sparse_coo_tensor(size=(2, 8), check_invariants=True)},
            "not a strided tensor",
        ),
    ],
)
def test_refuses(change, reason):
    call = {"hidden_states": torch.randn(2, 8), "weight": torch.rand(8), "eps": EPS}
    assert npu.refuses(None, **call) is None
    assert reason in npu.refuses(None, **{**call, **change})


def test_refuses_gates_and_groups_that_do_not_fit():
    x, weight = torch.randn(2, 8), torch.rand(8)
    assert npu.refuses_gate_before(None, x, None, weight, EPS) is None
    assert "different shapes" in npu.refuses_gate_before(None, x, x[:1], weight, EPS)
    assert "float64" in npu.refuses_gate_after(None, x, x.double(), weight, EPS, torch.tanh)
    assert npu.refuses_grouped(None, x, weight, EPS, 4) is None
    assert "groups of 3" in npu.refuses_grouped(None, x, x, weight, EPS, 3)
