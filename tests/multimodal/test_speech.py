"""Real models of both families with parts for speech, in tiny sizes: without these parts, and as upstream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.multimodal.omni import FAMILIES, PARTS
from tests.once import once


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def speech(request, facts, tmp_path_factory):
    """What each process found: with speech, without, and upstream's code with a silent configuration."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)

    def run(*arguments: str, **environment: str) -> Any:
        printed = facts("facts_of_speech", family, str(folder), *arguments, VEOMNI_BANNER="1", **environment)
        return json.loads(printed.splitlines()[-1])

    def found() -> dict[str, Any]:
        return {
            "family": family,
            "full": run("saved-full"),
            "text": run("saved-text", VEOMNI_SPEECH="0"),
            "silent": run("saved-silent", "silent", VEOMNI_HOOK="0"),
        }

    return once(tmp_path_factory, f"speech_{family}", found)


@pytest.mark.sample(1)
def test_the_parts_are_not_built(speech):
    full, text = speech["full"], speech["text"]
    assert full["children"] == ["thinker", *PARTS[speech["family"]]] and full["has_talker"]
    assert text["children"] == ["thinker"] and not text["has_talker"]


@pytest.mark.sample(1)
def test_the_rest_is_what_upstream_builds_without_speech(speech):
    text, silent = speech["text"], speech["silent"]
    assert text["weights"] == silent["weights"] and text["random"] == silent["random"]
    assert text["text"] == speech["full"]["text"]


@pytest.mark.sample(1)
def test_the_given_configuration_does_not_change(speech):
    text = speech["text"]
    assert text["given"] is True and text["own"] is False and text["shared"]


@pytest.mark.sample(1)
def test_the_list_of_undivided_layers_names_no_absent_class(speech):
    assert speech["text"]["absent"] == []
    assert speech["silent"]["absent"]  # upstream's list does, and FSDP refuses such a model


@pytest.mark.sample(1)
def test_the_log_says_what_is_left_out(speech):
    (said,) = speech["text"]["said"]
    assert " and ".join(PARTS[speech["family"]]) in said and "0.2 MiB" in said
    assert speech["full"]["said"] == []
    (line,) = speech["text"]["line"]
    assert line.startswith(f"{speech['family']} patched at ") and "without speech: " in line


@pytest.mark.sample(1)
def test_forward_is_that_of_the_thinker(speech):
    assert speech["text"]["logits"] and speech["text"]["signature"]
    assert "logits" not in speech["full"]  # upstream's class has none


@pytest.mark.sample(1)
def test_trainer_trains_the_thinker(speech):
    assert speech["text"]["trained"]["changed"] == ["thinker"]
    assert speech["text"]["trained"]["loss"] > 0


@pytest.mark.sample(1)
def test_speech_is_an_error_that_names_the_setting(speech):
    assert (
        speech["text"]["speech"].startswith("SpeechError") and "VEOMNI_SPEECH=1" in speech["text"]["speech"]
    )
    assert "VEOMNI_SPEECH" not in speech["full"]["speech"] + speech["silent"]["speech"]


@pytest.mark.sample(1)
def test_text_is_the_default(speech):
    assert isinstance(speech["text"]["text"], list)
    assert speech["text"]["default"] == [speech["text"]["text"]] * 2


@pytest.mark.sample(1)
def test_a_full_checkpoint_is_loaded_without_the_parts(speech):
    loaded = speech["text"]["saved-full"]
    assert loaded == {"children": ["thinker"], "weights": speech["full"]["weights"], "reported": []}


@pytest.mark.sample(1)
def test_what_is_saved_is_loaded_without_this_package(speech):
    assert speech["text"]["saved"] is False and speech["full"]["saved"] is True
    here, there = speech["text"]["saved-text"], speech["silent"]["saved-text"]
    assert here == there and there["children"] == ["thinker"] and there["reported"] == []
