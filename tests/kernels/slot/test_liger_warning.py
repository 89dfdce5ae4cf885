"""Another library on a model that is patched, too: what is told of the places that it took, and the warning."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import pytest

from tests.kernels.liger_double import Liger, step
from tests.kernels.patched_qwen3 import batch, pair
from veomni_hook.errors import VeomniHookWarning
from veomni_hook.kernels.bind import bind
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.slot import Slot, liger_warning
from veomni_hook.tools.report.explanation import explain

NORM = "liger_kernel.transformers.rms_norm.LigerRMSNorm"
ROTARY = "liger_kernel.transformers.rope.liger_rotary_pos_emb"
LOSS = "liger_kernel.transformers.model.qwen3.lce_forward"
MLP = "liger_kernel.transformers.swiglu.LigerSwiGLUMLP.forward"


@pytest.fixture
def liger(monkeypatch):
    set_choice("torch")
    liger_warning._WARNED.clear()
    yield Liger(monkeypatch)
    liger_warning._WARNED.clear()


def reasons(model, op):
    return {row.reason for row in explain(model).rows if row.op == op}


@pytest.mark.filterwarnings("ignore:two libraries")
class TestExplain:
    def test_instances_that_were_patched(self, liger, patched):
        _, model = pair(patched)
        liger.to_model(model)
        for _ in range(2):
            assert reasons(model, "rms_norm") == {f"replaced by {NORM}.forward"}
            assert reasons(model, "gated_mlp") == {f"replaced by {MLP}"}
            assert reasons(model, "linear_cross_entropy") == {f"replaced by {LOSS}"}
            step(model, batch())
        text = str(explain(model))
        assert f"Qwen3RMSNorm x9: rms_norm/cast_before_weight: replaced by {NORM}.forward\n" in text
        assert "not called yet" not in text

    def test_one_instance_among_others(self, liger, patched):
        _, model = pair(patched)
        liger.to_norm(model.model.norm)
        step(model, batch())
        found = {row.place: row.reason for row in explain(model).rows if row.op == "rms_norm"}
        assert found.pop("model.norm") == f"replaced by {NORM}.forward"
        assert not any("replaced" in reason for reason in found.values())

    def test_classes_and_functions_that_were_replaced(self, liger, patched):
        liger.to_modules(patched)
        _, model = pair(patched)
        for _ in range(2):
            assert reasons(model, "rms_norm") == {f"replaced by {NORM}"}
            assert reasons(model, "rotary") == {f"replaced by {ROTARY}"}
            assert reasons(model, "linear_cross_entropy") == {f"replaced by {LOSS}"}
            step(model, batch())
        assert "LigerRMSNorm x9: rms_norm/cast_before_weight: replaced by" in str(explain(model))
        found = {row.op: row.reason for row in explain(patched).rows}
        assert found["rms_norm"] == f"replaced by {NORM}" and found["rotary"] == f"replaced by {ROTARY}"
        assert "replaced" not in found["gated_mlp"]

    def test_what_was_called_before_is_kept_and_the_change_said(self, liger, patched):
        _, model = pair(patched)
        step(model, batch())
        liger.to_model(model)
        (row,) = (row for row in explain(model).rows if row.op == "linear_cross_entropy")
        assert (row.backend, row.note) == ("torch", f"now replaced by {LOSS}")


class TestWarning:
    def test_the_first_call_warns_and_no_other(self, liger, patched):
        liger.to_modules(patched, loss=False)
        _, model = pair(patched)
        with pytest.warns(VeomniHookWarning, match="two libraries are stacked") as caught:
            step(model, batch())
        said = [str(each.message) for each in caught if "two libraries" in str(each.message)]
        assert len(said) == 1
        assert f"apply_rotary_pos_emb ({ROTARY})" in said[0] and f"Qwen3RMSNorm ({NORM})" in said[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error", VeomniHookWarning)
            step(model, batch())
            explain(model)

    def test_the_first_call_sees_instances(self, liger, patched):
        _, model = pair(patched)
        for layer in model.model.layers:
            liger.to_norm(layer.input_layernorm)
        with pytest.warns(VeomniHookWarning, match=rf"the forward of a Qwen3RMSNorm \({NORM}\.forward\)"):
            step(model, batch())

    @pytest.mark.parametrize("ask", [explain, lambda model: bind(model, "torch")])
    def test_whoever_asks_is_warned(self, liger, patched, ask):
        _, model = pair(patched)
        liger.to_model(model)
        with pytest.warns(VeomniHookWarning, match="VEOMNI_KERNELS=liger"):
            ask(model)

    def test_liger_that_took_nothing_is_no_reason(self, liger, patched):
        _, model = pair(patched)
        with warnings.catch_warnings():
            warnings.simplefilter("error", VeomniHookWarning)
            step(model, batch())
            explain(model)

    def test_a_module_that_was_made_without_a_file_is_not_read(self, monkeypatch):
        module = ModuleType("made_in_memory")
        exec("class Norm:\n    pass", vars(module))
        vars(module)["slot"] = Slot("rms_norm", "cast_before_weight", "made_in_memory")
        monkeypatch.setitem(sys.modules, "made_in_memory", module)
        monkeypatch.setitem(sys.modules, liger_warning.LIGER, ModuleType(liger_warning.LIGER))
        liger_warning._WARNED.clear()
        liger_warning.warn_of_first_call("made_in_memory", module.Norm())
