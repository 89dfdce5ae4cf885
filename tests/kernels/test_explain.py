from __future__ import annotations

import pytest
from torch import nn

from tests.kernels.patched_qwen3 import batch, pair
from veomni_hook.errors import KernelError
from veomni_hook.kernels.explain import explain
from veomni_hook.kernels.state import set_active, set_choice

SLOTS = {"veomni_rms_norm", "veomni_rotary", "veomni_gated_mlp", "veomni_linear_cross_entropy"}


def by_slot(explanation):
    return {row.slot: row for row in explanation.rows}


def test_a_module_shows_what_would_be_asked(patched):
    set_choice("rotary=eager")
    rows = by_slot(explain(patched))
    assert set(rows) == SLOTS
    assert rows["veomni_rotary"].backend == "eager" and rows["veomni_rms_norm"].backend == "torch"
    assert not any(row.called for row in rows.values())


def test_a_model_shows_every_place_and_why(patched):
    set_choice("torch")
    upstream, model = pair(patched)
    rows = explain(model).rows
    assert {row.slot for row in rows} == SLOTS and not any(row.called for row in rows)
    assert sum(row.slot == "veomni_rms_norm" for row in rows) == 1 + 2 * 4
    model.eval()
    model(**batch())
    rows = explain(model).rows
    assert all(row.called for row in rows)
    loss = by_slot(explain(model))["veomni_linear_cross_entropy"]
    assert (loss.backend, loss.place) == ("eager", "") and "eval" in loss.reason
    text = str(explain(model))
    assert "Qwen3RMSNorm x9: rms_norm/cast_before_weight: torch (chosen)" in text
    assert "not patched" in str(explain(upstream))


def test_deactivation_shows(patched):
    set_active(False)
    assert {row.reason for row in explain(pair(patched)[1]).rows} == {"veomni_hook is deactivated"}


def test_a_model_without_parameters():
    assert explain(nn.Identity()).rows == ()


def test_anything_else_is_an_error():
    with pytest.raises(KernelError, match="int"):
        explain(3)
