from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.kernels.patched_qwen3 import batch, pair
from veomni_hook.errors import KernelError
from veomni_hook.kernels.explain import explain
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.state import set_active, set_choice

NORM = "veomni_rms_norm_cast_before_weight"
ROTARY = "veomni_rotary_half_split"
LOSS = "veomni_linear_cross_entropy_next_token"
FUSED = "veomni_qk_norm_rotary_cast_before_weight_half_split"
ADDED = "veomni_add_rms_norm_cast_before_weight"
SLOTS = {NORM, ADDED, ROTARY, FUSED, LOSS, "veomni_gated_mlp_product"}


def by_slot(explanation):
    return {row.slot: row for row in explanation.rows}


def test_a_module_shows_what_would_be_asked(patched):
    set_choice("rotary=eager")
    rows = by_slot(explain(patched))
    assert set(rows) == SLOTS
    assert rows[ROTARY].backend == "eager" and rows[NORM].backend == "torch"
    assert not any(row.called for row in rows.values())


def test_a_model_shows_every_place_and_why(patched):
    set_choice("torch")
    upstream, model = pair(patched)
    rows = explain(model).rows
    assert {row.slot for row in rows} == SLOTS and not any(row.called for row in rows)
    assert sum(row.slot == NORM for row in rows) == 1 + 2 * 4
    model.eval()
    model(**batch())
    rows = explain(model).rows
    # What stands in for norms with a rotation or a sum asks neither these norms nor the rotation.
    assert all(row.called for row in rows)
    reasons = {(row.place.rpartition(".")[2], row.op): row.reason for row in rows}
    assert reasons["input_layernorm", "rms_norm"] == reasons["norm", "rms_norm"] == "chosen"
    assert reasons["post_attention_layernorm", "rms_norm"] == "part of add_rms_norm"
    for place, op in (("q_norm", "rms_norm"), ("k_norm", "rms_norm"), ("self_attn", "rotary")):
        assert reasons[place, op] == "part of qk_norm_rotary"
    loss = by_slot(explain(model))[LOSS]
    assert (loss.backend, loss.place) == ("eager", "") and "eval" in loss.reason
    text = str(explain(model))
    assert "Qwen3RMSNorm x3: rms_norm/cast_before_weight: torch (chosen)" in text
    assert "not patched" in str(explain(upstream))


def test_parts_of_a_fused_op_that_runs_upstream_speak_for_themselves(patched):
    set_choice("torch,qk_norm_rotary=eager")
    _, model = pair(patched)
    model(**batch())
    rows = explain(model).rows
    assert {row.reason for row in rows if row.place.endswith("q_norm")} == {"chosen"}
    assert not any("qk_norm_rotary" in row.reason for row in rows if row.op != "qk_norm_rotary")


def test_deactivation_shows(patched):
    set_active(False)
    assert {row.reason for row in explain(pair(patched)[1]).rows} == {"veomni_hook is deactivated"}


def test_a_model_without_parameters():
    assert explain(nn.Identity()).rows == ()


def test_anything_else_is_an_error():
    with pytest.raises(KernelError, match="int"):
        explain(3)


class Routed(nn.Module):
    """Asks in a method that its forward calls, and in one that it inherits."""

    def forward(self, x):
        return self.route(x)

    def route(self, x):
        return SLOT.at(self, torch.neg)(x)


class Child(Routed):
    def forward(self, x):
        return x


SLOT = Slot("rms_norm", "cast_before_weight", __name__)


def test_every_method_counts():
    assert [row.slot for row in explain(Routed()).rows] == ["SLOT"]
    assert [row.slot for row in explain(Child()).rows] == ["SLOT"]


def test_a_slot_without_kernels_says_so_and_waits_for_no_call():
    set_choice("eager")
    (row,) = explain(Routed()).rows
    assert (row.backend, row.reason, row.called, row.settled) == ("eager", "eager is chosen", False, True)
    assert str(explain(Routed())).endswith("Routed x1: rms_norm/cast_before_weight: eager (eager is chosen)")
    set_choice("auto")
    assert str(explain(Routed())).endswith("torch (kernels=auto on cpu; not called yet)")
