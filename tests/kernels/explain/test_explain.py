import pytest
import torch
import torch._dynamo.testing
from torch import nn

from tests.kernels.patched_qwen3 import batch, pair
from veomni_hook.errors import KernelError
from veomni_hook.kernels.explain.rows import Row
from veomni_hook.kernels.selection.process_choice import set_active, set_choice
from veomni_hook.kernels.slot import Slot
from veomni_hook.tools.report.explanation import Explanation, explain

NORM = "veomni_rms_norm_cast_before_weight"
ROTARY = "veomni_rotary_half_split"
LOSS = "veomni_linear_cross_entropy_next_token"
FUSED = "veomni_qk_norm_rotary_cast_before_weight_half_split"
ADDED = "veomni_add_rms_norm_cast_before_weight"
REFUSED = "left to Inductor: torch refused the call"
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
    assert "Routed x1: rms_norm/cast_before_weight: eager (eager is chosen)\n" in str(explain(Routed()))
    set_choice("auto")
    assert "torch (kernels=auto on cpu; not called yet)\n" in str(explain(Routed()))


class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def told(self, choice, x):
        set_choice(choice)
        model = Guarded()
        counter = torch._dynamo.testing.CompileCounter()
        run = torch.compile(model, backend=counter, fullgraph=True)
        for _ in range(3):
            run(x)
        assert counter.frame_count == 1
        (row,) = explain(model).rows
        return row

    @pytest.mark.parametrize(
        ("choice", "dtype", "backend", "reason"),
        [
            ("auto", torch.float32, "eager", "left to Inductor"),
            ("torch", torch.float32, "torch", "compiled in"),
            ("torch", torch.float64, "eager", f"{REFUSED}: upstream computes torch.float64 input in float32"),
        ],
    )
    def test_what_became_of_it_is_told(self, choice, dtype, backend, reason):
        row = self.told(choice, torch.ones(2, 4, 3, 8, dtype=dtype))
        assert (row.backend, row.reason, row.called) == (backend, reason, True)
        assert row.training == row.evaluation == ()

    @pytest.mark.slow
    @pytest.mark.parametrize("inside", [False, True])
    def test_parts_of_a_fused_op_that_was_compiled_in(self, patched, inside):
        set_choice("torch")
        _, model = pair(patched)
        compiled = torch.compile(model, backend="eager")
        compiled(**batch())
        model = compiled if inside else model
        reasons = {(row.place.rpartition(".")[2], row.op): row.reason for row in explain(model).rows}
        assert reasons["input_layernorm", "rms_norm"] == "compiled in"
        assert "compiled in" in {
            row.reason for row in explain(model).rows if row.op == "linear_cross_entropy"
        }
        assert reasons["q_norm", "rms_norm"] == reasons["self_attn", "rotary"] == "part of qk_norm_rotary"

    def test_of_another_choice_and_another_model_nothing_is_claimed(self):
        set_choice("torch")
        model, other = Guarded(), Guarded()
        torch.compile(model, backend="eager")(torch.ones(2, 8))
        assert explain(model).rows[0].compiled == "itself" and not explain(other).rows[0].called
        set_choice("auto")
        assert not explain(model).rows[0].called

    @pytest.mark.parametrize("known", [True, False])
    def test_layers_that_run_what_was_traced_for_one_of_them(self, known, monkeypatch):
        if not known:  # as where dynamo does not tell
            monkeypatch.setattr("veomni_hook.kernels.slot.compiled._traced_local", lambda _: None)
        set_choice("torch")
        model = nn.Sequential(Guarded(), Guarded(), Guarded())
        counter = torch._dynamo.testing.CompileCounter()
        for layer in model:
            layer.compile(backend=counter, fullgraph=True)
        model(torch.ones(2, 8))
        assert counter.frame_count <= 3
        assert {(row.backend, row.reason) for row in explain(model).rows} == {("torch", "compiled in")}

    def test_calls_that_are_not_compiled_say_more(self):
        self.told("auto", torch.ones(2, 4, 3, 8))
        set_choice("auto")
        model = Guarded()
        model(torch.ones(2, 4, 3, 8, dtype=torch.float64))
        (row,) = explain(model).rows
        assert "Inductor" not in row.reason and row.training


class Guarded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        if (kernel := GUARD.kernel(self, x, self.weight, 1e-6)) is not None:
            return kernel(x, self.weight, 1e-6)
        return x * self.weight.to(x.dtype)


GUARD = Slot("rms_norm", "cast_before_weight", __name__)


class Unsupplied(nn.Module):
    def forward(self, x):
        return PREFIXED.at(self, torch.neg)(x)


PREFIXED = Slot("rotary", "half_split_after_prefix", __name__)


class TestVariantsWithoutAKernel:
    def test_are_said_and_counted_apart(self):
        model = nn.Sequential(Unsupplied(), Routed())
        set_choice("auto")
        found = explain(model)
        row, other = found.rows
        assert (row.backend, row.supplied, row.settled, other.supplied) == ("eager", False, True, True)
        assert row.reason == "no kernel exists for this formula on any machine; upstream's code runs"
        assert str(found).splitlines()[-2] == "  1 of 2 places: no machine has a kernel"
        assert "no machine" not in str(explain(Routed()))

    def test_a_backend_by_name_is_not_taken_for_one(self):
        set_choice("torch")
        (row,) = explain(Unsupplied()).rows
        assert row.backend == "torch" and "torch is the formula in PyTorch" in row.note

    def test_kernels_by_name_alone_are_named(self):
        set_choice("auto")
        slot = Slot("qk_norm_rotary", "cast_before_weight_half_split_partial", __name__)
        reason = slot.outcome(Routed()).reason
        assert reason.startswith("auto uses none of its kernels; choose one by name: triton")


class TestPrinting:
    @pytest.mark.parametrize("columns", [40, 80, 132])
    def test_repr_fits_the_terminal(self, patched, monkeypatch, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        set_choice("torch")
        _, model = pair(patched)
        model(**batch())
        text = repr(explain(model))
        # Only a word that is longer than a line goes beyond its end.
        assert all(len(line) <= columns or len(line.split()) == 1 for line in text.splitlines())
        assert [line[:3] for line in text.splitlines()[:2]] == ["Qwe", "  Q"]
        assert "".join(text.split()) == "".join(str(explain(model)).split())
        assert max(map(len, str(explain(model)).splitlines())) > 80

    def test_html_escapes_what_it_shows(self):
        set_choice("auto")
        page = explain(type("<script>alert(1)</script>&", (Routed,), {})())._repr_html_()
        assert "<script>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in page
        assert page.count("<tr>") == 2 and "<td>rms_norm/cast_before_weight</td>" in page

    def test_html_of_nothing(self):
        assert "no kernel slots" in explain(nn.Identity())._repr_html_()
        assert "veomni_hook.adopt(model) patches" in str(explain(nn.Identity()))

    def test_rows_are_made_and_hashed_as_before(self):
        row = Row(
            "", "Norm", "slot", "rms_norm", "cast_before_weight", "torch", "chosen", "torch", called=True
        )
        assert len({row, row}) == 1 and (row.settled, row.training, row.note) == (False, (), "")
        assert "torch (chosen)\n" in str(Explanation("Norm", (row,)))
