"""RMSNorm with gates and groups in Triton, beyond what all variants are compared in."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as module_globals
from transformers.activations import ACT2FN

from tests.kernels.contract import call_of
from tests.kernels.matching import DEVICE

pytest.importorskip("triton")

from veomni_hook.kernels.rms_norm import gated, rounded

EPS = 1e-3
AFTER = ("cast_before_weight_gated", "weight_before_cast_gated")


call = partial(call_of, "rms_norm")


@pytest.mark.parametrize(
    "activation",
    [torch.sigmoid, nn.Sigmoid(), nn.SiLU(), ACT2FN["silu"]],
    ids=["sigmoid", "Sigmoid", "SiLU", "ACT2FN silu"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", AFTER)
def test_the_activation_decides_at_the_call(variant, dtype, activation):
    made = call(variant, "triton", (3, 5, 24), dtype, activation=lambda _: activation)
    assert made.refused() is None
    made.matches()


@pytest.mark.parametrize("name", ["gate_before_norm", "gate_before_norm_grouped"])
def test_without_a_gate(name):
    grouped = {"group_size": lambda _: 6} if name.endswith("grouped") else {}
    call(name, "triton", (4, 24), gate=lambda _: None, **grouped).matches()


@pytest.mark.parametrize("group_size", [1, 5, 15])
def test_more_groups_than_programs(group_size):
    call("gate_before_norm_grouped", "triton", (7, 15), group_size=lambda _: group_size).matches()


def test_rows_of_no_values():
    x = torch.randn(2, 0, device=DEVICE)
    assert rounded.inverse_rms(x, EPS).isnan().all() and rounded.inverse_rms(x, EPS).shape == (2, 1)
    assert gated.gate_before_norm(x, x, torch.rand(0, device=DEVICE), EPS).shape == (2, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": functional.gelu}, "the activation gelu is not supported, only SiLU and sigmoid"),
        ({"activation": nn.GELU()}, "the activation GELU is not supported"),
        ({"activation": nn.SiLU(inplace=True)}, "in place"),
        ({"activation": []}, "the activation list is not supported"),
        ({"gate": torch.randn(2, 1)}, "different shapes"),
        ({"gate": torch.randn(2, 8, dtype=torch.float64)}, "the gate has dtype torch.float64"),
        ({"gate": torch.randn(2, 8, device="meta")}, "the gate is on meta"),
        ({"gate": 1.0}, "an operand is a float"),
        ({"weight": torch.rand(4)}, "does not match"),
        ({"hidden_states": torch.randn(2, 8, dtype=torch.float64)}, "float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(change, reason):
    operands = {
        "hidden_states": torch.randn(2, 8),
        "gate": torch.randn(2, 8),
        "weight": torch.rand(8),
        "eps": EPS,
        "activation": functional.silu,
    }
    assert gated.refuses_gate_after(None, **operands) is None
    assert reason in gated.refuses_gate_after(None, **(operands | change))


def test_refuses_activations_whose_call_is_seen():
    operands = (None, torch.randn(2, 8), torch.randn(2, 8), torch.rand(8), EPS)
    for prepare in (
        lambda act: act.register_forward_hook(lambda *_: None),
        lambda act: act.register_full_backward_pre_hook(lambda *_: None),
        lambda act: setattr(act, "forward", torch.relu),
    ):
        activation = nn.SiLU()
        prepare(activation)
        assert "which a fused kernel would skip" in gated.refuses_gate_after(*operands, activation)
    with module_globals.register_module_forward_hook(lambda *_: None):
        assert "global hook" in gated.refuses_gate_after(*operands, nn.SiLU())
    assert gated.refuses_gate_after(*operands, nn.SiLU()) is None


@pytest.mark.parametrize("group_size", [3, 0, 16, None, 4.0])
def test_refuses_other_groups(group_size):
    x, weight = torch.randn(2, 8), torch.rand(8)
    assert gated.refuses_grouped(None, x, weight, EPS, 4) is None
    assert gated.refuses_grouped(None, x, None, weight, EPS, 4) is None
    assert "do not divide into groups" in gated.refuses_grouped(None, x, weight, EPS, group_size)
    assert "different shapes" in gated.refuses_grouped(None, x, weight, weight, EPS, 4)
