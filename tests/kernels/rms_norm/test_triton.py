"""The Triton kernels: through the interpreter on a CPU (conftest sets it up), compiled on a GPU."""

import pytest
import torch

from tests.kernels import declared
from tests.kernels.contract import DTYPES, call_of
from tests.kernels.rms_norm.cases import EPS

pytest.importorskip("triton")

from veomni_hook.kernels.rms_norm import tiles
from veomni_hook.kernels.rms_norm import triton as kernels


def call(variant, *of, **changed):
    return call_of("rms_norm", variant, "triton", *of, **changed)


@pytest.mark.sample(1)  # the interpreter needs seconds for each
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", sorted(declared.kernels("rms_norm", "triton")))
def test_wide_rows(variant, dtype):
    call(variant, (3, 4100), dtype).matches()


@pytest.mark.parametrize("columns", [8200, pytest.param(12288, marks=pytest.mark.slow)])
def test_wide_rows_in_two_blocks(columns):
    assert tiles.split(columns)[1]
    call("one_plus_weight", (3, columns)).matches()


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
        call(variant, (67, columns), dtype, weight_dtype).matches()


@pytest.mark.parametrize("variant", SPLIT)
def test_two_blocks_take_strides(split_early, variant):
    for laid in (part_of_turned, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        call(variant, (4, 6, 23), hidden_states=laid).matches(of=lambda y: y.transpose(0, 1))


def part_of_turned(x):
    """The same rows, as columns of wider ones whose first two dimensions lie the other way."""
    wide = torch.cat((x[..., :8], x, x[..., :9]), -1).transpose(0, 1).contiguous().transpose(0, 1)
    return wide[..., 8 : 8 + x.shape[-1]]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", SPLIT)
def test_two_blocks_have_equal_bits_in_any_batch(split_early, variant, dtype):
    call(variant, (64, 23), dtype).is_batch_invariant()


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
        call(variant, (rows, columns), dtype, weight_dtype).matches()


@pytest.mark.parametrize("variant", IN_PARTS)
def test_parts_take_strides(in_parts, variant):
    call(variant, (2, 3, 23), hidden_states=part_of_turned).matches(of=lambda y: y.transpose(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("variant", IN_PARTS)
def test_parts_have_equal_bits_in_any_batch(in_parts, variant):
    call(variant, (41, 23), torch.bfloat16).is_batch_invariant()


@pytest.mark.parametrize(
    "columns", [12296, *(pytest.param(e, marks=pytest.mark.slow) for e in (20480, 32768))]
)
def test_the_widest_rows(columns):
    assert tiles.wide(columns, 4, fetched=False)
    call("one_plus_weight", (3, columns)).matches()


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
