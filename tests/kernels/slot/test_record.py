"""Calls are counted by module, in training and in evaluation."""

import gc
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.kernels.patched_qwen3 import batch, pair
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.shared import repeated
from veomni_hook.kernels.slot import Outcome, Slot
from veomni_hook.kernels.slot.record import Tally
from veomni_hook.tools.report.explanation import explain

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
LOSS = "linear_cross_entropy"


@pytest.fixture(autouse=True)
def chosen():
    set_choice("torch")


class Norm(nn.Module):
    """Asks a slot and computes nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        return SLOT.kernel(self, x, self.weight, self.variance_epsilon)


SLOT = Slot("rms_norm", "cast_before_weight", __name__)


def only(model, op="rms_norm"):
    (row,) = (row for row in explain(model).rows if row.op == op)
    return row


def test_training_and_evaluation_apart():
    norm = Norm()
    for _ in range(3):
        norm(X)
    with torch.no_grad():
        norm(X)
    norm.eval()
    norm(X.double())
    row = only(norm)
    assert row.training == (("torch", "chosen", 3),)
    assert [(each.backend, each.times) for each in row.evaluation] == [("torch", 1), ("eager", 1)]
    assert (row.backend, row.reason) == (row.evaluation[-1].backend, row.evaluation[-1].reason)


def test_the_last_call_speaks_whatever_it_was():
    norm = Norm()
    norm.eval()(X.double())
    norm.train()(X)
    assert (only(norm).backend, only(norm).reason) == ("torch", "chosen")
    norm.eval()(X.double())
    assert only(norm).backend == "eager" and only(norm).training[-1].backend == "torch"


def test_modules_have_counts_of_their_own_and_leave_none_behind():
    first, second = Norm(), Norm()
    first(X)
    second(X), second(X)
    assert (only(first).training[0].times, only(second).training[0].times) == (1, 2)
    held = len(SLOT.records)
    del first
    gc.collect()
    assert len(SLOT.records) == held - 1


def test_reasons_without_end_take_no_memory():
    tally = Tally()
    for size in range(1000):
        tally.turn(Outcome("eager", f"{size} rows"))
        tally.turn(Outcome("torch", "chosen"))
    assert tally.calls() == (("eager", "999 rows", 1000), ("torch", "chosen", 1000))
    assert len(tally._counts) == len(tally._reasons) == 2


def test_a_loss_that_is_fused_in_training_alone(patched):
    _, model = pair(patched)
    for _ in range(3):
        model(**batch()).loss.backward()
    model.eval()
    model(**batch())
    row = only(model, LOSS)
    assert row.training == (("torch", "chosen", 3),)
    ((backend, reason, times),) = row.evaluation
    assert (backend, times) == ("eager", 1) and "eval" in reason
    (line,) = (line for line in str(explain(model)).splitlines() if f"{LOSS}/" in line)
    assert "in training: torch (chosen) 3 calls; 1 call in evaluation" in line


def test_places_of_one_line_are_summed(patched):
    set_choice("torch,qk_norm_rotary=eager,add_rms_norm=eager")
    _, model = pair(patched)
    model(**batch())
    model(**batch())
    text = str(explain(model))
    assert "Qwen3RMSNorm x9: rms_norm/cast_before_weight: torch (chosen), 18 calls in training" in text


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_is_computed_again_is_called_again(reentrant):
    norm = Norm()
    x = X.clone().requires_grad_()

    def run(x):
        return norm(x)(x, norm.weight, norm.variance_epsilon)

    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=reentrant).sum().backward()
    times = [sum(each.times for each in calls) for calls in (only(norm).training, only(norm).evaluation)]
    assert (times, only(norm).first_passes) == (([1, 0], 1) if reentrant else ([2, 0], 0))


def test_a_fused_op_speaks_for_the_mode_that_its_parts_did_not_see(patched):
    _, model = pair(patched)
    model.train()
    model(**batch())
    model.eval()
    model.model.layers[0].post_attention_layernorm(torch.randn(1, 2, 32))
    found = {row.place: row for row in explain(model).rows if row.op == "rms_norm"}
    row = found["model.layers.0.post_attention_layernorm"]
    assert row.evaluation == (("torch", "chosen", 1),)
    assert row.training == (("torch", "part of add_rms_norm", 1),)


class TestFirstPassesOfCheckpoints:
    """A reentrant checkpoint runs a part without gradients, and again with gradients in the backward pass."""

    def test_of_a_model_are_no_evaluation(self, patched):
        set_choice("auto")
        _, model = pair(patched)
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
        for _ in range(2):
            model(**batch()).loss.backward()
        rows = [row for row in explain(model).rows if row.op == "rotary"]
        assert [(row.backend, row.reason) for row in rows] == [("torch", "picked by auto")] * 2
        assert [(row.training, row.evaluation, row.first_passes) for row in rows] == [
            ((("torch", "picked by auto", 2),), (), 2)
        ] * 2
        text = str(explain(model))
        assert "in evaluation" not in text and "without gradients" not in text
        assert "torch (picked by auto), 4 calls in training; 4 calls in first passes of checkpoints" in text
        with torch.no_grad():
            model(**batch())
        assert [
            sum(each.times for each in row.evaluation) for row in explain(model).rows if row.op == "rotary"
        ] == [1, 1]

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_stand_between_an_evaluation_before_and_one_behind(self, reentrant):
        norm, x = Norm(), X.clone().requires_grad_()

        def evaluate():
            with torch.no_grad():
                norm(X)

        evaluate()
        checkpoint(lambda x: (norm(x), x.square())[1], x, use_reentrant=reentrant).sum().backward()
        evaluate()
        row = only(norm)
        counts = [sum(each.times for each in calls) for calls in (row.training, row.evaluation)]
        assert (*counts, row.first_passes) == ((1, 2, 1) if reentrant else (2, 2, 0))

    def test_the_stack_is_searched_once_in_an_evaluation(self, monkeypatch):
        norm, searches = Norm(), []
        frame = sys._getframe
        spy = SimpleNamespace(_getframe=lambda depth: searches.append(depth) or frame(depth + 1))
        monkeypatch.setattr(repeated, "sys", spy)
        (X.clone().requires_grad_() * 2)  # a node: what was known before is void
        with torch.no_grad():
            for _ in range(3):
                norm(X)
        assert len(searches) == 1 and only(norm).evaluation[0].times == 3
