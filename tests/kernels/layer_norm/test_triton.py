"""The Triton kernels: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

from functools import partial

import pytest
import torch

from tests.kernels import declared
from tests.kernels.layer_norm import variants
from tests.kernels.layer_norm.variants import EPS
from tests.kernels.matching import DEVICE, assert_matches

pytest.importorskip("triton")

from veomni_hook.kernels.layer_norm import triton as kernels

GROUPED = ["weight_before_cast", "cast_before_weight_and_bias", "operator_before_weight_and_bias"]

pair = partial(variants.pair, "triton")
inputs = partial(variants.inputs, device=DEVICE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        (4100, torch.float32),
        *(pytest.param(c, torch.bfloat16, marks=pytest.mark.slow) for c in (8192, 12288)),
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", ["weight_before_cast", "cast_before_weight_and_bias"])
def test_wide_rows(variant, columns, dtype):
    assert_matches(*pair(variant, columns), inputs(variant, (3, columns), dtype))


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", GROUPED)
def test_groups_of_strided_input(variant):
    x, *parameters = inputs(variant, (2, 5, 3, 16), torch.float32, groups=True)
    ours, upstream = pair(variant, 16)
    turned = [lambda *given, f=f: f(*given).transpose(1, 2) for f in (ours, upstream)]
    for made in (x[:, ::2], x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert_matches(*turned, [made, *parameters])
    apart = torch.randn(2, 3, 5, 16, device=DEVICE).transpose(1, 2)  # groups that are no neighbours
    assert_matches(*turned, [apart, *parameters])


def test_rows_far_from_zero_keep_their_variance():
    variant = "weight_before_cast"
    x, weight = inputs(variant, (5, 64), torch.float32)
    assert_matches(*pair(variant, 64), [x + 300.0, weight], tolerance=1e-4)


WEIGHTED = {"hidden_states": torch.randn(2, 8), "weight": torch.rand(8), "bias": torch.rand(8), "eps": EPS}
SHAPED = {"hidden_states": torch.randn(2, 8), "normalized_shape": (8,), "eps": EPS}


@pytest.mark.parametrize(
    ("operands", "change", "reason"),
    [
        (WEIGHTED, {"hidden_states": torch.randn(2, 8, dtype=torch.float64)}, "float64"),
        (WEIGHTED, {"weight": torch.rand(8, dtype=torch.float64)}, "a parameter has dtype"),
        (WEIGHTED, {"weight": None}, "NoneType"),
        (WEIGHTED, {"weight": torch.rand(4)}, "does not match"),
        (WEIGHTED, {"bias": torch.rand(2, 8)}, "different shapes"),
        (WEIGHTED, {"weight": torch.rand(16)[::2]}, "not contiguous"),
        (WEIGHTED, {"bias": torch.rand(8, device="meta")}, "a parameter is on meta"),
        (WEIGHTED, {"eps": torch.ones(())}, "eps is a Tensor"),
        (SHAPED, {"hidden_states": torch.randn(())}, "not a strided tensor with a dimension"),
        (SHAPED, {"hidden_states": torch.empty(1, 40_000), "normalized_shape": (40_000,)}, "at most 32768"),
        (SHAPED, {"normalized_shape": (2, 8)}, "not over the last dimension alone"),
        (SHAPED, {"normalized_shape": (1,)}, "not over the last dimension alone"),
        (
            SHAPED,
            {"hidden_states": torch.sparse_coo_tensor(size=(2, 8), check_invariants=True)},
            "not a strided tensor",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(operands, change, reason):
    rule = kernels.refuses("unweighted" if operands is SHAPED else "cast_before_weight_and_bias")
    assert rule(None, *operands.values()) is None
    assert reason in rule(None, *(operands | change).values())


def test_refuses_where_upstreams_operator_does_otherwise():
    x, parameter = torch.randn(2, 8), torch.rand(8)
    rule = kernels.refuses("weight_and_bias_before_cast")
    assert rule(None, x.bfloat16(), (8,), parameter, parameter, EPS) is None
    assert "float32" in rule(None, x, (8,), parameter.bfloat16(), parameter.bfloat16(), EPS)
    rule = kernels.refuses("operator_before_weight_and_bias")
    with torch.autocast("cpu"):
        assert rule(None, x, (8,), parameter, parameter, EPS) is None
        assert "autocast" in rule(None, x.bfloat16(), (8,), parameter, parameter, EPS)
    assert rule(None, x.bfloat16(), (8,), parameter, parameter, EPS) is None


def test_small_calls_are_left_to_torchs_operator():
    x, *_ = inputs("unweighted", (3, 8), torch.float32)
    assert "torch's operator costs the host less" in kernels.loses(None, x)
    assert kernels.loses(None, torch.empty(kernels.SMALLEST, device="meta")) is None
    for variant, large in (
        ("unweighted", True),
        ("weight_before_cast", True),
        ("cast_before_weight_and_bias", False),
    ):
        kernel = declared.kernels("layer_norm", "triton")[variant]
        assert (kernel.loses is not None) is large
