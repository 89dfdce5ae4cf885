"""The Triton kernels: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

from functools import partial

import pytest
import torch

from tests.kernels.batches import assert_batch_invariant
from tests.kernels.matching import DEVICE, assert_matches
from tests.kernels.rms_norm import variants
from tests.kernels.rms_norm.variants import DTYPES, EPS, wide
from veomni_hook.kernels.selection.registry import registry

pytest.importorskip("triton")

from veomni_hook.kernels.rms_norm import tiles
from veomni_hook.kernels.rms_norm import triton as kernels

VARIANTS = sorted(k.variant for k in registry.kernels("rms_norm") if k.backend == "triton")


pair = partial(variants.pair, "triton")
inputs = partial(variants.inputs, device=DEVICE)


@pytest.mark.parametrize(("variant", "dtype"), wide(VARIANTS), ids=str)
def test_wide_rows(variant, dtype):
    assert_matches(*pair(variant, 4100), inputs(variant, (3, 4100), dtype))


@pytest.mark.parametrize("columns", [8200, pytest.param(12288, marks=pytest.mark.slow)])
def test_wide_rows_in_two_blocks(columns):
    assert tiles.split(columns)[1]
    assert_matches(*pair("one_plus_weight"), inputs("one_plus_weight", (3, columns), torch.float32))


def test_blocks_cover_a_row_and_no_more_than_they_must():
    for columns in (*range(1, 300), *range(2040, 32769, 7), 32768):
        head, tail = tiles.split(columns)
        assert all(block == tiles.power(block) for block in (head, tail or 1)) and tail < head
        assert columns <= head + tail <= tiles.power(columns)
        assert not tail or head <= columns
    found = {columns: tiles.split(columns) for columns in (2560, 6144, 8192, 8320, 12288, 16000, 20480, 48)}
    assert found == {
        2560: (4096, 0), 6144: (8192, 0), 8192: (8192, 0), 8320: (8192, 128), 12288: (8192, 4096),
        16000: (16384, 0), 20480: (16384, 4096), 48: (64, 0),
    }  # fmt: skip


#: Those that `kernels.BACKWARD` computes the gradient of.
SPLIT = [
    "cast_before_weight", "cast_to_weight", "divided_by_root", "one_plus_weight", "one_plus_weight_rounded",
    "unweighted", "unweighted_rounded_scale", "weight_before_cast", "without_cast",
]  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "columns", [23, *(pytest.param(each, marks=pytest.mark.slow) for each in (17, 24, 161))]
)
@pytest.mark.parametrize("variant", SPLIT)
def test_two_blocks_equal_the_reference(split_early, variant, columns, dtype):
    assert tiles.split(columns)[1]
    for weight_dtype in (None, torch.float32):
        assert_matches(*pair(variant), inputs(variant, (67, columns), dtype, weight_dtype))


@pytest.mark.parametrize("variant", SPLIT)
def test_two_blocks_take_strides(split_early, variant):
    ours, upstream = pair(variant)
    x, *weight = inputs(variant, (6, 4, 40), torch.float32)
    x, weight = x.transpose(0, 1)[..., 8:31], [each[:23].contiguous() for each in weight]
    turned = [lambda *given, f=f: f(*given).transpose(0, 1) for f in (ours, upstream)]
    assert_matches(*turned, [x, *weight])
    assert_matches(*turned, [torch.randn(4, 23, 6, device=DEVICE).transpose(1, 2), *weight])


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", SPLIT)
def test_two_blocks_have_equal_bits_in_any_batch(split_early, variant, dtype):
    given = inputs(variant, (64, 23), dtype)
    rows, weights = [x for x in given if x.ndim == 2], [x for x in given if x.ndim == 1]
    assert_batch_invariant(pair(variant)[0], rows, weights)


# The interpreter takes most of a second for such a call: few rows, and by default one formula.
IN_PARTS = [
    pytest.param(each, marks=[] if each == "cast_before_weight" else pytest.mark.slow) for each in SPLIT
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "columns", [60, *(pytest.param(each, marks=pytest.mark.slow) for each in (9, 16, 23, 32, 161))]
)
@pytest.mark.parametrize("variant", IN_PARTS)
def test_parts_equal_the_reference(in_parts, variant, columns, dtype):
    assert tiles.wide(columns, 4, fetched=False)
    for rows, weight_dtype in ((7, None), (1, torch.float32)):
        assert_matches(*pair(variant), inputs(variant, (rows, columns), dtype, weight_dtype))


@pytest.mark.parametrize("variant", IN_PARTS)
def test_parts_take_strides(in_parts, variant):
    ours, upstream = pair(variant)
    x, *weight = inputs(variant, (3, 2, 40), torch.float32)
    x, weight = x.transpose(0, 1)[..., 8:31], [each[:23].contiguous() for each in weight]
    turned = [lambda *given, f=f: f(*given).transpose(0, 1) for f in (ours, upstream)]
    assert_matches(*turned, [x, *weight])


@pytest.mark.slow
@pytest.mark.parametrize("variant", IN_PARTS)
def test_parts_have_equal_bits_in_any_batch(in_parts, variant):
    given = inputs(variant, (41, 23), torch.bfloat16)
    rows, weights = [x for x in given if x.ndim == 2], [x for x in given if x.ndim == 1]
    assert_batch_invariant(pair(variant)[0], rows, weights)


@pytest.mark.parametrize(
    "columns", [12296, *(pytest.param(e, marks=pytest.mark.slow) for e in (20480, 32768))]
)
def test_the_widest_rows(columns):
    assert tiles.wide(columns, 4, fetched=False)
    assert_matches(*pair("one_plus_weight"), inputs("one_plus_weight", (3, columns), torch.float32))


def test_parts_cover_a_row():
    assert tiles.wide(12288, 2, fetched=True) is None
    for columns in (12289, 14336, 16384, 16385, 20480, 20481, 28672, 28673, 32768):
        for size in (2, 4):
            found = tiles.wide(columns, size, fetched=True)
            assert found.block == tiles.power(found.block)
            assert (found.parts - 1) * found.block < columns <= found.parts * found.block <= 8 * found.block
            ahead = columns <= 28672
            assert not ahead or found.lines // 2 * 128 < columns * size <= found.lines * 128
            assert ahead == bool(found.lines) and not tiles.wide(columns, size, fetched=False).lines


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_states": torch.randn(2, 8, dtype=torch.float64)}, "float64"),
        ({"weight": torch.rand(8, dtype=torch.float64)}, "the weight has dtype"),
        ({"weight": torch.rand(4)}, "does not match"),
        ({"weight": torch.rand(16)[::2]}, "not contiguous"),
        ({"weight": torch.rand(8, device="meta")}, "the weight is on meta"),
        ({"eps": torch.ones(())}, "eps is a Tensor"),
        ({"hidden_states": torch.empty(1, 40_000)}, "at most 32768"),
        ({"hidden_states": torch.randn(())}, "at most"),
        (
            {"hidden_states": torch.sparse_coo_tensor(size=(2, 8), check_invariants=True)},
            "not a strided tensor",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(change, reason):
    operands = {"hidden_states": torch.randn(2, 8), "weight": torch.rand(8), "eps": EPS}
    assert kernels.refuses(None, **operands) is None
    assert reason in kernels.refuses(None, **(operands | change))
