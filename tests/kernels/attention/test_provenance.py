"""Whether a user chose the attention's implementation; what is recorded is tested with the experts'."""

import sys
from types import SimpleNamespace

import pytest

from veomni_hook.kernels.attention.provenance import (
    bypassed,
    forget_choice,
    note_assignment,
    note_request,
    overridden,
    users_choice,
)
from veomni_hook.kernels.moe_experts import provenance as of_experts
from veomni_hook.kernels.shared import recorded_choice


class Config:
    sub_configs = ()
    _attn_implementation_internal = "eager"

    @property
    def _attn_implementation(self):
        return self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value):
        note_assignment(self, value)
        self._attn_implementation_internal = value


class Model:
    def __init__(self):
        self.config = Config()

    def modules(self):
        return [self]

    def set_attn_implementation(self, value):
        note_request(self, value)


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", SimpleNamespace(PreTrainedModel=Model))
    recorded_choice._found_watched.cache_clear()
    yield
    recorded_choice._found_watched.cache_clear()


def test_the_default_is_no_choice():
    assert users_choice(Model()) is None
    assert users_choice(SimpleNamespace()) is None
    assert users_choice(SimpleNamespace(config=object())) is None


def test_a_value_that_was_assigned_or_requested_is():
    assigned, requested = Model(), Model()
    assigned.config._attn_implementation = "eager"
    requested.set_attn_implementation("eager")
    for model in (assigned, requested):
        assert users_choice(model) == "attn_implementation='eager' was chosen"
        assert overridden(model, "flex") == "attn_implementation='eager'"
        assert overridden(model, "eager") is None
    assigned.config._attn_implementation = None
    assert overridden(assigned, "flex") is None


def test_another_default_of_transformers_is_said():
    model = Model()
    model.config._attn_implementation_internal = "sdpa"
    assert users_choice(model) is None  # a window's slot is in this function
    assert bypassed(model, "sliding_window") is None
    assert bypassed(model, "softcap") == "transformers uses attn_implementation='sdpa'"
    model.config._attn_implementation_internal = "flash_attention_2"
    assert bypassed(model, "softcap") == "transformers uses attn_implementation='flash_attention_2'"


def test_an_unwatched_value_may_be_a_choice(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", SimpleNamespace(PreTrainedModel=object))
    recorded_choice._found_watched.cache_clear()
    assert "may have been chosen" in users_choice(Model())


def test_records_of_attention_and_experts_are_apart_and_are_not_saved():
    config = Config()
    config._attn_implementation = "eager"
    of_experts.note_assignment(config, "grouped_mm")
    saved = dict(vars(config))
    forget_choice(saved)
    assert [key for key in saved if key.startswith("_veomni")] == ["_veomni_experts_choice"]
    of_experts.forget_choice(saved)
    assert not any(key.startswith("_veomni") for key in saved)
