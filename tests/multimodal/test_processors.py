"""Inputs of the Omni processors: upstream's, and with the fix that takes empty lists and ``audios=``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.once import once
from veomni_hook.errors import InputError
from veomni_hook.multimodal.processor_inputs import expected
from veomni_hook.tools.cli.app import app

FIX = "veomni_hook.patches.fixes.omni_processor_inputs"
FAMILIES = ("qwen2_5_omni", "qwen3_omni_moe")


@pytest.fixture(scope="module")
def both(facts, tmp_path_factory):
    def found() -> tuple[dict[str, Any], dict[str, Any]]:
        one, other = facts("facts_of_processors"), facts("facts_of_processors", VEOMNI_PATCHES=FIX)
        return json.loads(one.splitlines()[-1]), json.loads(other.splitlines()[-1])

    return once(tmp_path_factory, "processors", found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_empty_lists_are_none(both, family):
    upstream, fixed = both[0][family], both[1][family]
    assert "Error" in upstream["empty"]  # the reason for the fix
    assert fixed["empty"] == fixed["no audios"] == fixed["none"] == upstream["none"]


@pytest.mark.parametrize("family", FAMILIES)
def test_audios_is_audio(both, family):
    upstream, fixed = both[0][family], both[1][family]
    assert upstream["audios"] != upstream["audio"]
    assert fixed["audios"] == fixed["audio"] == upstream["audio"]
    assert "input_features" in fixed["audio"]
    assert fixed["image"] == "RuntimeError: asked for an image or a video", "what is given is processed"
    assert fixed["both"].startswith("InputError") and not str(upstream["both"]).startswith("InputError")


def test_commands_take_processing_modules(monkeypatch):
    module = "transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe"
    shown = CliRunner().invoke(app, ["diff", module, "--config", FIX])
    assert shown.exit_code == 0 and "+        if (veomni_inputs := veomni_expected(" in shown.stdout
    checked = CliRunner().invoke(app, ["check", "--config", FIX, "--json"])
    assert checked.exit_code == 0 and module in checked.stdout
    monkeypatch.setenv("VEOMNI_PATCHES", FIX)
    listed = json.loads(CliRunner().invoke(app, ["list", module, "--by", "family", "--json"]).stdout)
    assert [(row["config"], row["installed"]) for row in listed["configs"]] == [(f"{FIX}:config", True)]


def test_expected_inputs_are_left_alone():
    image, others = np.zeros((2, 2)), {"padding": True}
    assert expected(None, None, None, others) is None
    assert expected(image, [image], (image,), others) is None
    assert expected("path", np.zeros(0), [[]], {}) is None


def test_other_inputs_are_replaced_and_not_changed():
    others = {"audios": (), "padding": True}
    nothing = {"images": None, "videos": None, "audio": None}
    assert expected(None, None, None, others) == nothing | {"padding": True}
    assert others == {"audios": (), "padding": True}
    assert expected([], [1], None, {}) == {"images": None, "videos": [1], "audio": None}
    assert expected(None, None, None, {"audios": [2]}) == nothing | {"audio": [2]}


def test_both_names_are_an_error():
    with pytest.raises(InputError, match="both audio= and audios="):
        expected(None, None, [], {"audios": [1]})
