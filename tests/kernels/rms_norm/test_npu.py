"""The npu kernels on the double of torch_npu's operators, against the reference."""

import pytest
import torch

from tests.kernels import declared
from tests.kernels.contract import call_of
from tests.kernels.rms_norm.cases import EPS
from veomni_hook.kernels.rms_norm import npu

pytestmark = pytest.mark.usefixtures("operators")

KERNELS = declared.kernels("rms_norm", "npu")
BY_OPERATOR = [variant for variant, kernel in KERNELS.items() if kernel.automatic]


@pytest.mark.parametrize("variant", BY_OPERATOR)
def test_the_operator_computes_it_both_ways(variant, called):
    call_of("rms_norm", variant, "npu", (4, 6), torch.bfloat16).matches()
    assert called == ["npu_rms_norm", "npu_rms_norm_backward"]


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
    assert "float64" in npu.refuses_gate_before(None, x, x.double(), weight, EPS, torch.tanh)
    assert npu.refuses_grouped(None, x, weight, EPS, 4) is None
    assert "groups of 3" in npu.refuses_grouped(None, x, x, weight, EPS, 3)
