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
    full, text, silent = speech["full"], speech["text"], speech["silent"]
    assert full["children"] == ["thinker", *PARTS[speech["family"]]] and full["has_talker"]
    assert text["children"] == ["thinker"] and not text["has_talker"]
    # The rest is what upstream builds without speech.
    assert text["weights"] == silent["weights"] and text["random"] == silent["random"]
    assert text["text"] == full["text"]
    # The configuration that is given does not change.
    assert text["given"] is True and text["own"] is False and text["shared"]
    # The list of undivided layers names no absent class; upstream's does, and FSDP refuses such a model.
    assert text["absent"] == [] and silent["absent"]


@pytest.mark.sample(1)
def test_the_log_says_what_is_left_out(speech):
    (said,) = speech["text"]["said"]
    assert " and ".join(PARTS[speech["family"]]) in said and "0.2 MiB" in said
    assert speech["full"]["said"] == []
    (line,) = speech["text"]["line"]
    assert line.startswith(f"{speech['family']} patched at ") and "without speech: " in line


@pytest.mark.sample(1)
def test_forward_and_training_are_those_of_the_thinker(speech):
    text = speech["text"]
    assert text["logits"] and text["signature"]
    assert "logits" not in speech["full"]  # upstream's class has none
    assert text["trained"]["changed"] == ["thinker"] and text["trained"]["loss"] > 0


@pytest.mark.sample(1)
def test_text_is_the_default_and_speech_an_error_that_names_the_setting(speech):
    text = speech["text"]
    assert isinstance(text["text"], list) and text["default"] == [text["text"]] * 2
    assert text["speech"].startswith("SpeechError") and "VEOMNI_SPEECH=1" in text["speech"]
    assert "VEOMNI_SPEECH" not in speech["full"]["speech"] + speech["silent"]["speech"]


@pytest.mark.sample(1)
def test_checkpoints_of_either_kind_are_loaded_with_and_without_this_package(speech):
    full, text = speech["full"], speech["text"]
    assert text["saved-full"] == {"children": ["thinker"], "weights": full["weights"], "reported": []}
    assert text["saved"] is False and full["saved"] is True
    here, there = text["saved-text"], speech["silent"]["saved-text"]
    assert here == there and there["children"] == ["thinker"] and there["reported"] == []
