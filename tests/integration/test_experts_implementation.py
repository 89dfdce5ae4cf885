"""A user's experts_implementation wins over auto, transformers' default does not; with real models."""

from pathlib import Path

import pytest

from tests.processes import facts as facts_of
from tests.processes import started

SCRIPT = Path(__file__).with_name("facts_of_experts_implementation.py")

#: Two scripts with many models: half a minute.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    running = {mode: started(SCRIPT, mode, cache=cache) for mode in ("early", "late")}
    return {mode: facts_of(process) for mode, process in running.items()}


def test_the_default_is_there_and_no_choice(facts):
    models = facts["early"]["models"]
    assert models.pop("value") == "grouped_mm"
    assert models.pop("saved") is False
    chosen = {name for name, reason in models.items() if reason is not None}
    assert chosen == {name for name in models if name.startswith("explicit")}
    assert len(chosen) > 10


def test_a_choice_wins_over_auto_and_a_kernel_by_name_over_both(facts):
    assert facts["early"]["runs"] == {
        "auto, default": 1,
        "auto, explicit": 0,
        "auto, eager": 0,
        "moe_experts=tried, default": 1,
        "moe_experts=tried, explicit": 1,
        "moe_experts=tried, eager": 1,
        "eager, default": 0,
        "eager, explicit": 0,
        "eager, eager": 0,
        "compiled": 0,
    }


def test_a_late_hook_takes_no_default_for_granted(facts):
    assert "may have been chosen" in facts["late"]["models"]["default"]
    runs = facts["late"]["runs"]
    assert [runs[f"auto, {name}"] for name in ("default", "explicit", "eager")] == [0, 0, 0]
    assert runs["moe_experts=tried, default"] == 1
