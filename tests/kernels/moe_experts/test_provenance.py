from __future__ import annotations

import copy
import pickle
import sys
from types import SimpleNamespace

import pytest

from veomni_hook.kernels.moe_experts.provenance import (
    forget_choice,
    note_assignment,
    note_request,
    users_choice,
)
from veomni_hook.kernels.shared import recorded_choice


class Config:
    """A config whose assignments are noted, as those of patched transformers are."""

    sub_configs = ("text", "vision")

    def __init__(self, **parts):
        vars(self).update(parts)
        self._experts_implementation_internal = None

    @property
    def _experts_implementation(self):
        return self._experts_implementation_internal

    @_experts_implementation.setter
    def _experts_implementation(self, value):
        note_assignment(self, value)
        held = self._experts_implementation_internal
        self._experts_implementation_internal = value.get("", held) if isinstance(value, dict) else value
        for key in self.sub_configs:
            part = getattr(self, key, None)
            if part is not None:
                kept = part._experts_implementation
                part._experts_implementation = value.get(key, kept) if isinstance(value, dict) else value

    def resolve(self):
        """What transformers does where a model is made: past the property."""
        self._experts_implementation_internal = self._experts_implementation_internal or "grouped_mm"
        return self


class UnwatchedConfig:
    sub_configs = ()

    def __init__(self, value):
        self._experts_implementation = value


class Model:
    def __init__(self, config, *parts):
        self.config = config
        self.parts = parts

    def modules(self):
        yield self
        yield SimpleNamespace(config=None)
        for part in self.parts:
            yield from part.modules()

    def set_experts_implementation(self, value):
        note_request(self, value)


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    """A process in which transformers' models are patched."""
    models = SimpleNamespace(PreTrainedModel=Model)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", models)
    recorded_choice._found_watched.cache_clear()
    yield
    recorded_choice._found_watched.cache_clear()


def choice(config):
    reason = users_choice(SimpleNamespace(config=config))
    return reason and reason.split("'")[1]


def test_a_default_is_no_choice():
    config = Config().resolve()
    assert config._experts_implementation == "grouped_mm"
    assert users_choice(SimpleNamespace(config=config), "hidden_states", "ids") is None
    assert choice(copy.deepcopy(config).resolve()) is None


def test_an_explicit_choice_of_the_default_is_one():
    config = Config().resolve()
    config._experts_implementation = "grouped_mm"
    assert choice(config) == "grouped_mm"
    assert users_choice(SimpleNamespace(config=config)) == "experts_implementation='grouped_mm' was chosen"
    config._experts_implementation = None
    assert choice(config.resolve()) is None


def test_survives_copies():
    config = Config()
    config._experts_implementation = "eager"
    assert choice(copy.copy(config)) == choice(copy.deepcopy(config)) == "eager"
    assert choice(pickle.loads(pickle.dumps(config))) == "eager"


def test_a_choice_for_all_parts():
    config = Config(text=Config(), vision=Config())
    config._experts_implementation = "eager"
    assert [choice(each) for each in (config, config.text, config.vision)] == ["eager"] * 3


def test_a_choice_for_one_part():
    config = Config(text=Config().resolve(), vision=Config().resolve()).resolve()
    config._experts_implementation = {"text": "batched_mm"}
    assert [choice(each) for each in (config, config.text, config.vision)] == [None, "batched_mm", None]
    config.vision._experts_implementation = "eager"
    assert choice(config.vision) == "eager"
    config._experts_implementation = {"": "grouped_mm"}
    assert [choice(each) for each in (config, config.text, config.vision)] == [
        "grouped_mm",
        "batched_mm",
        "eager",
    ]
    assert not [key for part in (config, config.text, config.vision) for key in vars(part) if "kept" in key]


def test_a_request_for_a_model_and_its_parts():
    config = Config(text=Config().resolve(), vision=None).resolve()
    model = Model(config, Model(config.text))
    model.set_experts_implementation("grouped_mm")
    assert [choice(config), choice(config.text)] == ["grouped_mm"] * 2
    model.set_experts_implementation({"text": "eager"})
    assert [choice(config), choice(config.text)] == ["grouped_mm", "eager"]
    model.set_experts_implementation(None)
    assert [choice(config), choice(config.text)] == [None, None]


def test_a_request_for_a_part():
    config = Config(text=Config().resolve()).resolve()
    inner = Model(config.text)
    Model(config, inner)
    inner.set_experts_implementation("eager")
    assert [choice(config), choice(config.text)] == [None, "eager"]


@pytest.mark.parametrize(
    ("caller", "chosen"),
    [
        ("transformers.generation.utils", None),
        ("transformers", None),
        ("transformers_modules.x", "eager"),
        ("__main__", "eager"),
    ],
)
def test_requests_of_transformers_itself_are_no_choice(caller, chosen):
    model = Model(Config().resolve())
    exec("model.set_experts_implementation('eager')", {"__name__": caller, "model": model})
    assert choice(model.config) == chosen


def test_what_generation_puts_back_stays_a_choice():
    model = Model(Config())
    model.set_experts_implementation("grouped_mm")
    exec(
        "model.set_experts_implementation('batched_mm')",
        {"__name__": "transformers.generation.utils", "model": model},
    )
    assert choice(model.config) == "grouped_mm"


def test_is_not_saved():
    config = Config().resolve()
    plain = set(vars(config))
    config._experts_implementation = "eager"
    entries = dict(vars(config))
    assert set(entries) > plain
    forget_choice(entries)
    assert set(entries) == plain
    forget_choice(entries)


def test_an_owner_without_that_switch():
    assert users_choice(SimpleNamespace()) is None
    assert users_choice(SimpleNamespace(config=None)) is None
    assert users_choice(SimpleNamespace(config=SimpleNamespace())) is None


def test_a_process_that_sees_no_choice_says_so():
    reason = users_choice(SimpleNamespace(config=UnwatchedConfig("grouped_mm")))
    assert reason is not None and "may have been chosen" in reason and "before veomni_hook" in reason
    assert users_choice(SimpleNamespace(config=UnwatchedConfig(None))) is None


def test_models_that_are_not_watched_make_configs_unclear(monkeypatch):
    unpatched = SimpleNamespace(
        PreTrainedModel=SimpleNamespace(set_experts_implementation=lambda self, x: None)
    )
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", unpatched)
    reason = users_choice(SimpleNamespace(config=Config().resolve()))
    assert reason is not None and "may have been chosen" in reason
