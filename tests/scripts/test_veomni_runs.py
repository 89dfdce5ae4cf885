"""VeOmni's patches beside plain models; a run over all configs needs VeOmni and minutes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from scripts.tables import END, placed
from scripts.veomni_runs import BEGIN, PAGE, rows, summed
from tests.veomni.newer import forget, noted, with_missing
from tests.veomni.sides import differences

SHOWN = ("5.23.0", "5.24.0")
CLOSE = {"loss": {"difference": 3e-6, "scale": 3.0, "close": True}}
FAR = {"tokens": {"difference": 7.0, "scale": 90.0, "close": False}}
ERROR = {"error": ["{}", "ValueError: no\nlabels"]}


def one(*, calls, **more):
    return (
        {"patches": 4, "applied": ["A.forward", "A.dummy"], "renamed": [], "ran": [], "added": {}}
        | more
        | {"calls": calls}
    )


FOUND = {
    "alone": {
        "llama_gpu": one(
            calls={"A/text": {}, "A/generate: text": {}}, renamed=["A.forward"], ran=["A.forward", "A.dummy"]
        ),
        "vision_gpu": one(calls={"B/text": {}}, ran=["A.forward"], added={"A.dummy": "TypeError: none"}),
    },
    "with idioms": {
        "llama_gpu": one(calls={"A/text": CLOSE, "A/generate: text": FAR}),
        "vision_gpu": one(calls={"B/text": ERROR}),
    },
}


def test_a_row_for_each_config():
    _, llama, vision = rows(FOUND)
    assert llama.split() == [*"llama_gpu 2 of 4 1 2 2 equal, same bits 1 of 2 differ".split()]
    assert vision.split() == [*"vision_gpu 2 of 4 0 1 1 equal, same bits 1 of 1 differ".split()]


def test_the_sum_hides_nothing():
    text = " ".join(summed(FOUND, ["transformers.a.Output"], "0.1.12", "5.24.0"))
    assert "On 5.24.0, 4 of the 8 patches of VeOmni 0.1.12 apply, 1 of them with renamed parameters." in text
    assert "4 passes and 2 runs of `generate` of the 2 configs." in text
    assert "Alone: 3 with the same bits." in text
    assert "With idioms: 1 within 1e-06, 2 differ." in text
    assert "- `A/generate: text`: tokens: off by 7.0e+00." in text
    assert "- `B/text`: ValueError: no labels." in text
    assert "3 of the patches ran, 1 of them methods that VeOmni adds" in text
    assert "Nothing calls the others: `A.dummy`." in text
    assert "- `A.dummy`: TypeError: none." in text
    assert "stand in for 1 names, such as `transformers.a.Output`." in text
    assert "stand in" not in " ".join(summed(FOUND, [], "0.1.12", "5.9.0"))


def test_the_page_has_a_place_for_it():
    text = PAGE.read_text(encoding="utf-8")
    for release in SHOWN:
        begin = BEGIN.format(release)
        once = placed(text, begin, ["a sum"])
        assert "a sum" in once.partition(begin)[2].partition(END)[0]
        assert "| Release |" in once


def test_a_missing_name_of_transformers_is_stood_in_for(monkeypatch):
    module = ModuleType("transformers.made_for_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    missing: list[str] = []

    def work() -> object:
        from transformers.made_for_this_test import Output  # type: ignore[import-not-found]

        return Output

    assert with_missing(work, missing) is module.Output
    assert missing == ["transformers.made_for_this_test.Output"]

    def other() -> None:
        from tests.once import nothing  # type: ignore[attr-defined]  # noqa: F401

    with pytest.raises(ImportError, match="nothing"):
        with_missing(other, missing)


def test_a_forgotten_module_is_executed_again():
    import transformers.models.llama
    from transformers.models.llama import LlamaModel, modeling_llama

    forget(modeling_llama.__name__)
    try:
        assert transformers.models.llama.LlamaModel is not LlamaModel
    finally:
        sys.modules[modeling_llama.__name__] = modeling_llama
        vars(transformers.models.llama).update(LlamaModel=LlamaModel, modeling_llama=modeling_llama)


def test_code_that_ran_is_noted():
    ran: set[Any] = set()
    with noted(ran):
        one(calls={})
    assert one.__code__ in ran
    assert rows.__code__ not in ran


def test_differences_name_what_is_missing_or_far():
    here = {"loss": torch.tensor(1.0), "logits": torch.ones(2), "grad": None}
    assert not differences(here, dict(here))
    found = differences(here, {"loss": torch.tensor(1.0 + 1e-6), "logits": torch.zeros(2)})
    assert found["loss"]["close"]
    assert not found["logits"]["close"]
    assert differences(here, {**here, "grad": torch.ones(1)}) == {"grad": ["missing", "(1,)"]}
    assert differences(here, "ValueError: no")["error"][1] == "ValueError: no"
