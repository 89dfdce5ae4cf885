"""What explain says of guards in whose place something else stands, and of those that nobody asks."""

import functools
import types

import pytest
import torch
from torch import nn

from tests.kernels.patched_qwen3 import batch, pair
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.slot import Slot
from veomni_hook.tools.report.explanation import explain

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
HERE = __name__
LOSS = "linear_cross_entropy"


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        if (kernel := SLOT.kernel(self, x, self.weight, 1e-6)) is not None:
            return kernel(x, self.weight, 1e-6)
        return x * self.weight


class Calling(nn.Module):
    def forward(self, x):
        return ROTARY.at(self, turned)(x, x, x, x)


def turned(q, k, cos, sin, unsqueeze_dim=1):
    return q


SLOT = Slot("rms_norm", "cast_before_weight", __name__)
ROTARY = Slot("rotary", "half_split", __name__, "q, k, cos, sin, unsqueeze_dim=1")
ORIGINAL = Norm.forward


def foreign(self, x):
    return x * 2


def by_name(self, x):
    return ORIGINAL(self, x)


def covering(method):
    """Calls what it covers and does not say so."""

    def forward(self, *args):
        return method(self, *args)

    return forward


def silent(method):
    """Says that it covers the method, and never calls it."""

    @functools.wraps(method)
    def forward(self, x):
        return x

    return forward


class Callable_:
    def __call__(self, x):
        return x


class Quiet(Norm):
    def forward(self, x):
        return x


class Doubling(Norm):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.fixture(autouse=True)
def choice():
    set_choice("torch")


def only(model, op="rms_norm"):
    (row,) = (row for row in explain(model).rows if row.op == op)
    return row


class TestReplaced:
    @pytest.mark.parametrize(
        ("made", "name"),
        [
            (lambda norm: types.MethodType(foreign, norm), f"{HERE}.foreign"),
            (lambda norm: functools.partial(foreign, norm), f"{HERE}.foreign"),
            (lambda norm: torch.nn.functional.silu, "torch.nn.functional.silu"),
            (lambda norm: Callable_(), f"{HERE}.Callable_"),
        ],
        ids=["bound", "partial", "function", "object"],
    )
    def test_a_forward_of_an_instance(self, made, name):
        norm = Norm()
        norm.forward = made(norm)
        for _ in range(2):
            row = only(norm)
            assert (row.backend, row.reason) == ("replaced", f"replaced by {name}")
            norm(X)
        head, line, _ = str(explain(norm)).splitlines()
        assert (head, line) == ("Norm:", f"  Norm x1: rms_norm/cast_before_weight: replaced by {name}")

    def test_a_forward_of_the_class(self, monkeypatch):
        monkeypatch.setattr(Norm, "forward", foreign)
        assert only(Norm()).reason == f"replaced by {HERE}.foreign"

    def test_a_name_that_wraps_copied_is_not_believed(self, monkeypatch):
        upstream = nn.Identity.forward
        monkeypatch.setattr(Norm, "forward", functools.wraps(upstream)(foreign))
        assert only(Norm()).reason == f"replaced by {HERE}.foreign"

    def test_a_class_whose_name_was_changed(self):
        norm = Norm()
        norm.forward = types.MethodType(foreign, norm)
        Norm.__name__ = "LigerRMSNorm"  # as Liger did for a while
        try:
            assert (only(norm).kind, only(norm).backend) == ("Norm", "replaced")
        finally:
            Norm.__name__ = "Norm"

    def test_a_function_at_whose_calls_a_slot_is_asked(self, monkeypatch):
        model = Calling()
        assert only(model, "rotary").backend == "torch"
        other = types.FunctionType(foreign.__code__, {"__name__": "library.fast"})
        monkeypatch.setitem(globals(), "turned", functools.wraps(turned)(other))
        assert only(model, "rotary").reason == "replaced by library.fast.foreign"


class TestWrapped:
    @pytest.mark.parametrize(
        "made",
        [
            lambda norm: types.MethodType(covering(Norm.forward), norm),
            lambda norm: types.MethodType(functools.wraps(Norm.forward)(covering(Norm.forward)), norm),
            lambda norm: functools.partial(covering(Norm.forward), norm),
            lambda norm: types.MethodType(by_name, norm),
            lambda norm: functools.update_wrapper(functools.partial(by_name, norm), norm.forward),
        ],
        ids=["closure", "wraps", "partial", "name", "accelerate"],
    )
    def test_what_calls_the_guarded_forward_is_asked(self, made):
        norm = Norm()
        norm.forward = made(norm)
        row = only(norm)
        assert (row.backend, row.called) == ("torch", False) and row.note.startswith(f"behind {HERE}.")
        norm(X)
        row = only(norm)
        assert (row.backend, row.reason, row.note, row.training[0].times) == ("torch", "chosen", "", 1)

    def test_what_only_says_that_it_wraps_is_named_until_a_call(self):
        norm = Norm()
        norm.forward = types.MethodType(silent(Norm.forward), norm)
        norm(X)
        row = only(norm)
        assert not row.called and row.note == f"behind {HERE}.silent.<locals>.forward"

    def test_decorators_of_torch_are_no_news(self, monkeypatch):
        monkeypatch.setattr(Norm, "forward", torch.no_grad()(Norm.forward))
        assert only(Norm()).note == ""

    @pytest.mark.parametrize("home", [HERE, "users.script"])
    def test_a_subclass_that_calls_what_it_overrides(self, home, monkeypatch):
        monkeypatch.setattr(Doubling, "__module__", home)
        model = Doubling()
        assert not only(model).called and only(model).backend == "torch"
        model(X)
        assert only(model).called and only(model).note == ""


def test_a_subclass_that_overrides_a_forward(monkeypatch):
    assert explain(Quiet()).rows == ()  # in the patched module itself: upstream meant it so
    monkeypatch.setattr(Quiet, "__module__", "users.script")
    assert only(Quiet()).reason == f"replaced by {HERE}.Quiet.forward"


class FusedHead:
    """As TRL's `add_fused_lm_head`: the forward is wrapped and, asked for it, computes the loss by itself."""

    def __init__(self, model):
        original = model.forward

        @functools.wraps(type(model).forward)
        def _fused_forward(self, *args, fused_lm_head=False, labels=None, **kwargs):
            if not fused_lm_head:
                return original(*args, labels=labels, **kwargs)
            hidden = self.model(*args, **kwargs).last_hidden_state
            logits = hidden[:, :-1] @ self.lm_head.weight.T
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

        model.forward = types.MethodType(_fused_forward, model)


class TestNotCalled:
    def test_a_trainer_that_computes_the_loss_itself(self, patched):
        _, model = pair(patched)
        FusedHead(model)
        assert only(model, LOSS).backend == "torch" and not only(model, LOSS).called
        for _ in range(2):
            model(**batch(), fused_lm_head=True).backward()
        row = only(model, LOSS)
        assert row.backend == "not called"
        assert row.reason.startswith("in training, the model was never asked for a loss")
        assert "not called yet" not in str(explain(model))

    def test_evaluation_that_asks_does_not_hide_it(self, patched):
        _, model = pair(patched)
        FusedHead(model)
        model(**batch(), fused_lm_head=True).backward()
        model.eval()(**batch())
        row = only(model, LOSS)
        assert (row.backend, row.called) == ("eager", True) and "eval" in row.reason
        assert row.note.startswith("in training, the model was never asked for a loss")

    def test_a_model_that_is_asked_for_logits_alone(self, patched):
        _, model = pair(patched)
        model.eval()(input_ids=batch()["input_ids"])
        assert only(model, LOSS).reason.startswith("in evaluation, the model was never asked for a loss")

    def test_a_model_that_is_asked(self, patched):
        _, model = pair(patched)
        assert "never" not in only(model, LOSS).reason
        model(**batch()).loss.backward()
        assert "never" not in only(model, LOSS).reason + only(model, LOSS).note
