"""The Triton kernels: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

import pytest
import torch

from tests.kernels import declared
from tests.kernels.contract import call_of
from tests.kernels.layer_norm.cases import EPS

pytest.importorskip("triton")

from veomni_hook.kernels.layer_norm import triton as kernels

GROUPED = ["weight_before_cast", "cast_before_weight_and_bias", "operator_before_weight_and_bias"]


def call(variant, *of, **changed):
    return call_of("layer_norm", variant, "triton", *of, **changed)


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
    call(variant, ((3, columns), 1), dtype).matches()


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", GROUPED)
def test_groups_of_strided_input(variant):
    for laid in (
        lambda x: x[:, ::2],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # groups that are no neighbours
    ):
        made = call(variant, ((2, 5, 3, 16), 2), hidden_states=laid)
        made.matches(of=lambda y: y.transpose(1, 2))


def test_rows_far_from_zero_keep_their_variance():
    far = call("weight_before_cast", ((5, 64), 1), hidden_states=lambda x: x + 300.0)
    far.matches(tolerance=1e-4)


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
    (x,) = call("unweighted", ((3, 8), 1)).tensors
    assert "torch's operator costs the host less" in kernels.loses(None, x)
    assert kernels.loses(None, torch.empty(kernels.SMALLEST, device="meta")) is None
    for variant, large in (
        ("unweighted", True),
        ("weight_before_cast", True),
        ("cast_before_weight_and_bias", False),
    ):
        kernel = declared.kernels("layer_norm", "triton")[variant]
        assert (kernel.loses is not None) is large
