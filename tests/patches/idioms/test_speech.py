"""Which classes have parts for speech that can be left out, and what their code becomes."""

import logging
import warnings

import pytest
import torch

from tests.patches.idioms.applied import sites_of
from veomni_hook import PatchConfig
from veomni_hook.errors import SpeechError, VeomniHookWarning
from veomni_hook.multimodal import speech
from veomni_hook.patches.engine import Origin, patch_source
from veomni_hook.patches.idioms import speech as speech_idiom
from veomni_hook.patches.site import Status

MODEL = '''
import torch
from torch import nn

class Base(nn.Module):
    _keys_to_ignore_on_load_unexpected = None
    _no_split_modules = ["Voice", "Reader"]

    def save_pretrained(self, save_directory, is_main_process=True):
        self.saved = save_directory

class Reader(Base):
    def forward(self, input_ids, labels=None, **kwargs):
        """Reads."""
        return input_ids * 2

class Voice(Base):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.width, 256))
        self.pad = 7
        self.noise = torch.rand(3, device="cpu")

class Model(Base):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.reader = Reader()
        self.has_talker = config.speaks
        self.speakers = {}
        if self.has_talker:
            self.enable_talker()
        self.done = True

    def enable_talker(self):
        self.voice = Voice(self.config)
        self.voice.float()
        self.has_talker = True

    def load_speakers(self, path):
        for key, value in torch.load(path, weights_only=True).items():
            self.speakers[key] = value

    @classmethod
    def from_pretrained(cls, path):
        model = cls(path)
        model.load_speakers(cached_file(path, "voices.pt", subfolder=None))
        return model

    def generate(self, input_ids, speech=True):
        if speech and not self.has_talker:
            raise ValueError("upstream says no")
        pad = {"pad": self.voice.pad}
        if not speech:
            return input_ids
        return self.voice.weight, pad
'''
ORIGIN = Origin("transformers.models.tiny.modeling_tiny", "tiny.py", "transformers", "5")


class Config:
    """A configuration with parts for speech."""

    def __init__(self, speaks: bool = True) -> None:
        self.speaks = speaks
        self.width = 4096


def patched_class(source=MODEL):
    scope = {"__name__": "lookalike"}
    exec(patched(source), scope)
    return scope["Model"]


def patched(source=MODEL, *configs, optional=("speech",)):
    return patch_source(source, list(configs), ORIGIN, idioms=True, optional=optional).text


@pytest.fixture(autouse=True)
def nothing_said():
    speech._said.clear()


def test_four_places_and_one_candidate():
    sites = sites_of(speech_idiom, MODEL)
    assert {(site.status, site.variant) for site in sites} == {(Status.ROUTED, "left_out")}
    counted = [site.target for site in sites if site.counted]
    others = [site.target for site in sites if not site.counted]
    assert counted == ["Model.__init__"]
    assert others == ["Model.forward", "Model.generate", "Model.generate", "Model.save_pretrained"]
    assert sites[0].captures == {"field": "speaks", "parts": "voice"}


def test_it_applies_only_with_the_setting():
    assert patched(optional=()) == MODEL
    assert "veomni_speech.left_out" in patched()


def test_a_model_is_built_without_the_parts():
    given = Config()
    model = patched_class()(given)
    assert not hasattr(model, "voice") and model.has_talker is False and model.done
    assert given.speaks is True and model.config.speaks is False and model.config.width == 4096
    assert model._keys_to_ignore_on_load_unexpected == [r"^voice\."]
    assert model._no_split_modules == {"Reader"} and model.reader._no_split_modules == {"Reader"}
    assert type(model)._no_split_modules == ["Voice", "Reader"]


def test_a_configuration_without_speech_is_used_as_it_is():
    given = Config(speaks=False)
    model = patched_class()(given)
    assert model.config is given and model._keys_to_ignore_on_load_unexpected is None


def test_forward_is_that_of_the_rest():
    import inspect

    model = patched_class()(Config())
    ids = torch.arange(3)
    assert torch.equal(model(ids, labels=None), ids * 2)
    assert str(inspect.signature(model.forward)) == "(input_ids, labels=None, **kwargs)"
    own = MODEL.replace("    def generate", "    def forward(self):\n        return 1\n\n    def generate")
    assert patched_class(own)(Config())() == 1


def test_text_is_generated_and_speech_is_an_error():
    model, ids = patched_class()(Config()), torch.arange(3)
    assert model.generate(ids, speech=False) is ids
    with pytest.raises(SpeechError, match="VEOMNI_SPEECH=0"):
        model.generate(ids)
    with pytest.raises(ValueError, match="built without the parts"):
        model.generate(ids)


BY_MODE = MODEL.replace(
    "    def generate(self, input_ids, speech=True):\n",
    """    def generate(self, input_ids, **kwargs):
        speech = kwargs.pop("generation_mode", None) != "text"
        assert not kwargs
""",
)


def test_text_is_the_default_where_options_say_what_is_asked_for():
    model, ids = patched_class(BY_MODE)(Config()), torch.arange(3)
    for options in ({}, {"return_audio": False}, {"generation_mode": "text"}, {"generation_mode": None}):
        assert model.generate(ids, **options) is ids
    for options in ({"return_audio": True}, {"generation_mode": "audio"}):
        with pytest.raises(SpeechError, match="VEOMNI_SPEECH=0"):
            model.generate(ids, **options)
    with pytest.raises(SpeechError):
        model.generate(ids, generation_mode="text", return_audio=True)
    model.enable_talker()
    assert model.generate(ids)[0] is model.voice.weight
    assert "text_by_default" not in patched() + patched(BY_MODE.replace("kwargs.pop(", "dict.pop(kwargs, "))


def test_parts_that_are_built_later_are_used():
    model = patched_class()(Config())
    model.enable_talker()
    weight, pad = model.generate(torch.arange(3))
    assert weight is model.voice.weight and pad == {"pad": 7}


def test_the_file_that_loading_reads_is_saved(tmp_path):
    model = patched_class()(Config())
    model.speakers = {"one": 1}
    model.save_pretrained(tmp_path)
    assert model.saved == tmp_path
    assert torch.load(tmp_path / "voices.pt", weights_only=True) == {"one": 1}
    for name, args, options in (("a", (False,), {}), ("b", (), {"is_main_process": False})):
        (tmp_path / name).mkdir()
        model.save_pretrained(tmp_path / name, *args, **options)
        assert not list((tmp_path / name).iterdir())


def test_what_is_left_out_is_said_once_with_its_size(caplog):
    model = patched_class()
    state = torch.random.get_rng_state()
    with caplog.at_level(logging.INFO, "veomni_hook"):
        model(Config())
        model(Config())
    assert [record.getMessage() for record in caplog.records] == [
        "Model is built without speech (VEOMNI_SPEECH=0): voice left out, 4.0 MiB of weights"
    ]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_subclass_may_build_more(caplog):
    class Louder(patched_class()):
        def enable_talker(self) -> None:
            super().enable_talker()
            self.louder = torch.nn.Linear(1024, 1024, bias=False)

    with caplog.at_level(logging.INFO, "veomni_hook"):
        model = Louder(Config())
    assert [name for name, _ in model.named_children()] == ["reader"]
    assert "8.0 MiB" in caplog.text


def test_a_size_that_cannot_be_found_out_is_left_out(caplog):
    given = Config()
    del given.width
    with caplog.at_level(logging.INFO, "veomni_hook"):
        patched_class()(given)
    assert caplog.messages == ["Model is built without speech (VEOMNI_SPEECH=0): voice left out"]


DIFFERENT = {
    "does not set has_talker to a field": ("self.has_talker = config.speaks", "self.has_talker = True"),
    "settings is not a parameter": ("config.speaks", "settings.speaks"),
    "binds config again": ("self.config = config", "self.config = config = other(config)"),
    "nothing depends on has_talker": ("if self.has_talker:\n            self.enable", "if True:\n            self.enable"),
    "not one call of a method": (
        "            self.enable_talker()\n        self.done",
        "            self.enable_talker()\n            self.more()\n        self.done",
    ),
    "build_voice is not one of its methods": ("            self.enable_talker()\n", "            self.build_voice()\n"),
    "does not assign parts to attributes": ("self.voice = Voice(", "self.voice = imported("),
    "builds these parts itself": ("self.done = True", "self.voice = None"),
    "not one module with a forward": ("self.done = True", "self.second = Reader()"),
    "no __init__ of its own": (
        "__init__(self, config):\n        super().__init__()\n        self.config",
        "build(self, config):\n        self.config",
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", DIFFERENT)
def test_other_code_is_refused_with_a_reason(reason):
    old, new = DIFFERENT[reason]
    source = MODEL.replace(old, new)
    assert source != MODEL
    (site,) = sites_of(speech_idiom, source)
    assert reason in site.reason and site.counted
    assert site.status is (Status.MISSED if "no __init__" in reason else Status.REFUSED)


def test_a_refused_model_says_so_when_it_is_built():
    old, new = DIFFERENT["not one module with a forward"]
    model = patched_class(MODEL.replace(old, new))
    with pytest.warns(VeomniHookWarning, match="VEOMNI_SPEECH=0 does not apply to Model: without them"):
        built = model(Config())
    assert hasattr(built, "voice")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(Config())


def test_a_config_may_replace_one_of_the_places():
    config = PatchConfig(ORIGIN.module)

    @config.add_method("Model.forward")
    def forward(self, input_ids):
        return input_ids + 1

    text = patched(MODEL, config)
    assert "veomni_speech.left_out" in text and "veomni_speech.taking_what" not in text
