"""The npu kernels on the double of torch_npu's operators, against the reference."""

import pytest
import torch

from tests.kernels import declared
from tests.kernels.contract import call_of
from tests.kernels.matching import assert_matches
from tests.kernels.rotary.variants import states, tables
from veomni_hook.kernels.rotary import npu, reference
from veomni_hook.kernels.selection.registry import load_attribute

pytestmark = pytest.mark.usefixtures("operators")

KERNELS = declared.kernels("rotary", "npu")
F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
SOME = [
    "half_split", "half_split_partial", "half_width_halves", "pairs", "pairs_to_halves", "pairs_partial_repeated",
    "pairs_trailing_fp32_single", "half_split_reversed",
]  # fmt: skip


@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F16), (B16, B16), (B16, F32), (F32, F16)], ids=str)
@pytest.mark.parametrize("variant", KERNELS)
def test_equals_the_reference(variant, dtypes, called):
    call = call_of("rotary", variant, "npu", None, *dtypes)
    call.matches(tolerance=None if F32 in dtypes[:1] else 2e-2)
    # For each tensor, each way.
    assert called == ["npu_rotary_mul"] * (2 * sum(call.wanted))


#: Beside those of the contract.
MANY = [
    (2, 1, 1, 5, 16, 2),
    (1, 1, 1, 1100, 4, 1),
    (3, 400, 1, 2, 4, 1),
    (1001, 1, 2, 2, 4, 1),
    (2, 1001, 3, 2, 4, 2),
]


@pytest.mark.parametrize("size", MANY, ids=str)
@pytest.mark.parametrize("variant", SOME)
def test_many_of_each(variant, size):
    call_of("rotary", variant, "npu", size).matches()


@pytest.mark.parametrize("backend", ["npu", "triton"])
@pytest.mark.parametrize("variant", ["half_split_partial", "pairs_partial", "pairs_trailing_fp32_single"])
@pytest.mark.parametrize("rotated", [2, 6, 24])
def test_parts_of_a_head(variant, rotated, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    call_of("rotary", variant, backend, (2, 3, 2, 5, 24, 2, rotated)).matches()


@pytest.mark.parametrize("place", [1, 2, -3, -2])
@pytest.mark.parametrize("batched", [True, False])
def test_wherever_heads_are(place, batched):
    shape = [2, 3, 5, 16] if place in (1, -3) else [2, 5, 3, 16]
    if not batched:
        shape, place = shape[1:], place - 1 if place > 0 else place
    x = torch.randn(shape)
    cos, sin = tables("half_split", 2, 5, 16, F32)
    given = {"cos": cos if batched else cos[0], "sin": sin if batched else sin[0], "unsqueeze_dim": place}
    assert npu.rule("half_split")(None, x, x, *given.values(), reference.half_split) is None
    assert_matches(
        lambda q, k: npu.kernel("half_split")(q, k, **given),
        lambda q, k: reference.half_split(q, k, **given),
        [x, x + 1],
    )


def test_memory_of_projections_is_neither_moved_nor_left():
    q = states(2, 3, 5, 16, F32)
    cos, sin = tables("half_split", 2, 5, 16, F32)
    turned, _ = npu.kernel("half_split")(q, q, cos, sin)
    assert turned.stride() == q.stride() != turned.contiguous().stride()


def test_refuses_what_the_operator_does_not_take():
    q, (cos, sin) = states(1, 1, 2, 896, F32), tables("half_split", 1, 2, 896, F32)
    assert "less than 896" in npu.rule("half_split")(None, q, q, cos, sin, 1, reference.half_split)
    wide = [each[..., :894] for each in (q, q, cos, sin)]
    assert npu.rule("half_split")(None, *wide, 1, reference.half_split) is None
    assert "requires a gradient" in npu.rule("half_split")(
        None, *wide[:2], wide[2].requires_grad_(), wide[3], 1, reference.half_split
    )
    for kernel in KERNELS.values():
        assert callable(load_attribute(kernel.refuses))
