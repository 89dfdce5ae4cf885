"""The Triton kernels: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from tests.kernels import declared
from tests.kernels.batches import assert_batch_invariant
from tests.kernels.layer_norm import variants
from tests.kernels.layer_norm.variants import DTYPES, EPS, UPSTREAM
from tests.kernels.matching import assert_matches

pytest.importorskip("triton")

from veomni_hook.kernels.layer_norm import triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(3, 5, 7), (2, 0, 8), (0, 8), (1, 3), (129, 33), (2, 3, 4, 128)]
GROUPED = ["weight_before_cast", "cast_before_weight_and_bias", "operator_before_weight_and_bias"]

pair = partial(variants.pair, "triton")
inputs = partial(variants.inputs, device=DEVICE)


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        # In 16 bits one shape by default: where operands are rounded does not hang on sizes.
        pytest.param(
            *each, marks=[] if each[0] == SHAPES[0] or each[1] is torch.float32 else pytest.mark.slow
        )
        for each in product(SHAPES, DTYPES)
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", UPSTREAM)
def test_equals_the_reference(variant, shape, dtype):
    assert_matches(*pair(variant, shape[-1]), inputs(variant, shape, dtype))


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


@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (67, 2, 24), (3, 1, 8), (4, 0, 8)], ids=str)
@pytest.mark.parametrize("variant", GROUPED)
def test_a_weight_for_each_group(variant, shape):
    assert_matches(*pair(variant, shape[-1]), inputs(variant, shape, torch.float32, groups=True))


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


@pytest.mark.sample(6)
@pytest.mark.parametrize("parameter_dtype", [torch.float32, None], ids=str)
@pytest.mark.parametrize("variant", UPSTREAM)
def test_rounds_where_upstream_rounds(variant, parameter_dtype):
    ours, upstream = pair(variant, 96)
    # The interpreter cuts bfloat16 off.
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    given = inputs(variant, (257, 96), dtype, parameter_dtype)
    got, expected = ours(*given), upstream(*given)
    assert got.dtype == expected.dtype
    # A cast at another place changes a quarter of the results, another order of a sum hardly any.
    other = ~torch.isclose(
        got.float(), expected.float(), rtol=2e-6, atol=1e-6 if dtype is got.dtype else 2e-6
    )
    assert other.float().mean() < 0.01


@pytest.mark.parametrize("variant", UPSTREAM)
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_parameters_of_another_dtype(variant, dtypes):
    assert_matches(*pair(variant, 48), inputs(variant, (5, 48), *dtypes))


@pytest.mark.parametrize("wanted", [each for each in product((True, False), repeat=3)], ids=str)
def test_gradients_only_where_wanted(wanted):
    variant = "cast_before_weight_and_bias"
    assert_matches(*pair(variant, 9), inputs(variant, (4, 9), torch.float32), wanted)


def test_rows_far_from_zero_keep_their_variance():
    variant = "weight_before_cast"
    x, weight = inputs(variant, (5, 64), torch.float32)
    assert_matches(*pair(variant, 64), [x + 300.0, weight], tolerance=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 4, 10).transpose(0, 1),
        lambda: torch.randn(2, 5, 3, 24)[..., 8:16],
        lambda: torch.randn(4, 3, 5, 6, 8).permute(3, 1, 0, 2, 4),
        lambda: torch.randn(10, 6).t(),
        lambda: torch.randn(1, 8).expand(5, 8),
    ],
    ids=["swapped", "part of a row", "more steps than three", "columns apart", "one row for all"],
)
def test_strided_input(make):
    with torch.device(DEVICE):
        x = make()
        weight = torch.rand(x.shape[-1])
    results = []
    for function in pair("weight_before_cast", x.shape[-1]):
        leaf = x.detach().requires_grad_()
        y = function(leaf, weight)
        torch.manual_seed(1)
        (grad,) = torch.autograd.grad(y, leaf, torch.randn(y.shape).to(y))
        results.append((y, grad))
    torch.testing.assert_close(*results)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [False, True])
def test_the_operators_keep_their_contracts(groups):
    x, dy = (torch.randn(3, 5, 8, device=DEVICE) for _ in range(2))
    parameters = (torch.randn((5, 8) if groups else (8,), device=DEVICE) for _ in range(2))
    for weight, bias in ((*parameters,), (None, None)):
        call = (x, weight, bias, EPS, torch.bfloat16, torch.float32, torch.float32)
        torch.library.opcheck(torch.ops.veomni_hook.layer_norm.default, call)
        moments = torch.ops.veomni_hook.layer_norm(*call)[1]
        needs = [[weight is not None, bias is not None], [False, False], [False, bias is not None]]
        for needed, direct in zip(needs, (None, dy, x), strict=True):
            call = (x, weight, moments, dy, direct, torch.bfloat16, torch.float32, needed)
            torch.library.opcheck(torch.ops.veomni_hook.layer_norm_backward.default, call)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", UPSTREAM)
def test_equal_bits_from_run_to_run_and_for_a_row_in_any_batch(variant, dtype):
    x, *parameters = inputs(variant, (64, 130), dtype)
    assert_batch_invariant(pair(variant, 130)[0], [x], parameters)


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", UPSTREAM)
def test_compiles_without_a_break(variant):
    ours, upstream = pair(variant, 48)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_matches(compiled, upstream, inputs(variant, (5, 48), torch.float32))


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
