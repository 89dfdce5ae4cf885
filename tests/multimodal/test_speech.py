"""Real models of both families with parts for speech, in tiny sizes: without these parts, and as upstream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.multimodal.omni import FAMILIES, PARTS

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("facts_of_speech.py")


def run(family: str, folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    held = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    held |= {"VEOMNI_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path}
    held |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), family, str(folder), *arguments],
        env=held,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What each process found: with speech, without, and upstream's code with a silent configuration."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    return {
        "family": family,
        "full": run(family, folder, "saved-full"),
        "text": run(family, folder, "saved-text", VEOMNI_SPEECH="0"),
        "silent": run(family, folder, "saved-silent", "silent", VEOMNI_HOOK="0"),
    }


def test_the_parts_are_not_built(facts: Mapping[str, Any]) -> None:
    full, text = facts["full"], facts["text"]
    assert full["children"] == ["thinker", *PARTS[facts["family"]]] and full["has_talker"]
    assert text["children"] == ["thinker"] and not text["has_talker"]


def test_the_rest_is_what_upstream_builds_without_speech(facts: Mapping[str, Any]) -> None:
    text, silent = facts["text"], facts["silent"]
    assert text["weights"] == silent["weights"] and text["random"] == silent["random"]
    assert text["text"] == facts["full"]["text"]


def test_the_given_configuration_does_not_change(facts: Mapping[str, Any]) -> None:
    text = facts["text"]
    assert text["given"] is True and text["own"] is False and text["shared"]


def test_the_list_of_undivided_layers_names_no_absent_class(facts: Mapping[str, Any]) -> None:
    assert facts["text"]["absent"] == []
    assert facts["silent"]["absent"]  # upstream's list does, and FSDP refuses such a model


def test_the_log_says_what_is_left_out(facts: Mapping[str, Any]) -> None:
    (said,) = facts["text"]["said"]
    assert " and ".join(PARTS[facts["family"]]) in said and "0.2 MiB" in said
    assert facts["full"]["said"] == []
    (line,) = facts["text"]["line"]
    assert line.startswith(f"{facts['family']} patched at ") and "without speech: " in line


def test_forward_is_that_of_the_thinker(facts: Mapping[str, Any]) -> None:
    assert facts["text"]["logits"] and facts["text"]["signature"]
    assert "logits" not in facts["full"]  # upstream's class has none


def test_trainer_trains_the_thinker(facts: Mapping[str, Any]) -> None:
    assert facts["text"]["trained"]["changed"] == ["thinker"]
    assert facts["text"]["trained"]["loss"] > 0


def test_speech_is_an_error_that_names_the_setting(facts: Mapping[str, Any]) -> None:
    assert facts["text"]["speech"].startswith("SpeechError") and "VEOMNI_SPEECH=1" in facts["text"]["speech"]
    assert "VEOMNI_SPEECH" not in facts["full"]["speech"] + facts["silent"]["speech"]


def test_a_full_checkpoint_is_loaded_without_the_parts(facts: Mapping[str, Any]) -> None:
    loaded = facts["text"]["saved-full"]
    assert loaded == {"children": ["thinker"], "weights": facts["full"]["weights"], "reported": []}


def test_what_is_saved_is_loaded_without_this_package(facts: Mapping[str, Any]) -> None:
    assert facts["text"]["saved"] is False and facts["full"]["saved"] is True
    here, there = facts["text"]["saved-text"], facts["silent"]["saved-text"]
    assert here == there and there["children"] == ["thinker"] and there["reported"] == []
