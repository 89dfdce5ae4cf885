"""What is the npu backend's own, on the double of torch_npu's operators; `test_backends` has the rest."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.moe_experts.backends import BACKENDS
from tests.kernels.moe_experts.formulas import CASES
from veomni_hook.kernels.moe_experts import forms
from veomni_hook.kernels.moe_experts import npu as ours

pytestmark = pytest.mark.usefixtures("operators")

NPU = BACKENDS["npu"]
operands_of, assert_same = NPU.operands, NPU.assert_same


def test_operators_compute_it_both_ways(called):
    assert_same("gated", operands_of("gated"))
    there = ["npu_moe_token_permute", "npu_grouped_matmul", "npu_swiglu", "npu_grouped_matmul"]
    assert called[:5] == [*there, "npu_moe_token_unpermute"]
    back = called[5:]
    assert {name: back.count(name) for name in back} == {
        "npu_moe_token_permute": 2,
        "npu_grouped_matmul": 4,
        "npu_swiglu": 1,
        "npu_swiglu_backward": 1,
        "npu_moe_token_unpermute": 1,
    }


def test_of_frozen_experts_no_gradient_is_computed(called):
    operands = operands_of("gated")
    assert_same("gated", operands, wanted=[True, False, True, False, False])
    assert called.count("npu_grouped_matmul") == 4


@pytest.mark.parametrize("name", ["gated", "biased_interleaved_alpha_gated"])
def test_the_operators_keep_their_contracts(name):
    operands = operands_of(name)
    tensors, rest = forms.taken_apart([*operands, *CASES[name].rest])
    form = forms.form_of(name, tensors, rest)
    operators = torch.ops.veomni_hook
    torch.library.opcheck(operators.moe_experts_npu.default, (*tensors, *form, False))
    call = (*tensors, *form, True)
    torch.library.opcheck(operators.moe_experts_npu.default, call)
    _, *kept = operators.moe_experts_npu(*call)
    grad, needed = torch.randn_like(operands[0]), [each is not None for each in (tensors[0], *tensors[2:])]
    for wanted in (needed, [False, True, *[False] * 4]):
        call = (grad, *tensors, *kept, *form, wanted, False)
        torch.library.opcheck(operators.moe_experts_npu_backward.default, call)


def many(experts, top_k, tokens=1, hidden=2):
    """Operands whose memory is one number, for questions of their sizes alone."""
    ids = torch.zeros(1, 1, dtype=torch.int64).expand(tokens, top_k)
    number = torch.zeros(1, 1, 1)
    weights = number.expand(experts, 2, hidden), number.expand(experts, hidden, 1)
    return [number[0].expand(tokens, hidden), ids, number[0].expand(tokens, top_k), *weights, functional.silu]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"experts": 1024, "top_k": 512}, None),
        ({"experts": 1025, "top_k": 1}, "at most 1024 experts"),
        ({"experts": 2, "top_k": 513}, "at most 1024 experts, a top_k of at most 512"),
        ({"experts": 2, "top_k": 8, "tokens": 1 << 21}, "fewer than 16777215 pairs"),
        ({"experts": 2, "top_k": 2, "hidden": 65536}, "fewer than 65536 columns"),
    ],
)
def test_limits_of_the_operators(sizes, reason):
    found = ours.refuses(None, *many(**sizes))
    assert found is None if reason is None else reason in found


def test_refuses_float64():
    operands = operands_of("gated", torch.float64)
    assert "float64" in ours.refuses(None, *operands, functional.silu)
