from __future__ import annotations

import pytest

from tests.patches.idioms.applied import executed, spliced
from veomni_hook.checkpoints import CheckpointError, loaded
from veomni_hook.patches.idioms import expert_checkpoints
from veomni_hook.patches.routes.site import Status
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.text.document import Document

SOURCE = """
def convert_and_load_state_dict_in_model(model, state_dict):
    model.append(state_dict)
    return model, None


def _load_state_dict_into_zero3_model(model, state_dict, config):
    model.append(state_dict)
    return [], model


class Model:
    @staticmethod
    def _load_pretrained_model(model, read, zero3):
        if zero3:
            errors, info = _load_state_dict_into_zero3_model(model, read, None)
        else:
            merged = read
            info, index = convert_and_load_state_dict_in_model(
                model=model,
                state_dict=merged,
            )
        return info

    @staticmethod
    def _finalize_model_loading(model, info):
        try:
            model.append("tied")
        finally:
            model.append("reported")
        return info
"""


def sites_of(source):
    return list(expert_checkpoints.find(ModuleView(Document(source))))


def test_finds_both_methods():
    assert [(site.target, site.status, site.counted) for site in sites_of(SOURCE)] == [
        ("Model._load_pretrained_model", Status.ROUTED, False),
        ("Model._finalize_model_loading", Status.ROUTED, False),
    ]


@pytest.mark.parametrize("zero3", [False, True])
def test_names_are_checked_before_anything_is_loaded(zero3):
    model = executed(SOURCE, sites_of(SOURCE))["Model"]
    calls = []
    with pytest.raises(CheckpointError):
        model._load_pretrained_model(calls, {"experts.1.up_proj.weight": 0}, zero3)
    assert calls == []
    good = {"experts.0.up_proj.weight": 0}
    assert model._load_pretrained_model(calls, good, zero3) is calls
    assert calls == [good]


def test_the_report_is_checked_at_the_end(monkeypatch):
    checked = []
    monkeypatch.setattr(loaded, "check_loaded", lambda model, info: checked.append((list(model), info)))
    model = executed(SOURCE, sites_of(SOURCE))["Model"]
    assert model._finalize_model_loading([], "info") == "info"
    assert checked == [(["tied", "reported"], "info")]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= convert_and_load_state_dict_in_model(", "= convert_and_load("),
        ("state_dict=merged", "state_dict=dict(merged)"),
        ("                model=model,\n", ""),
        (
            "        return info\n\n",
            "        a = convert_and_load_state_dict_in_model(model=a, state_dict=b)\n\n",
        ),
        ("        return info\n", "        return info, 1\n"),
        ('            model.append("tied")', "            return info"),
        ("_finalize_model_loading(model, info)", "_finalize_model_loading(self, info)"),
    ],
)
def test_what_is_built_differently_is_a_miss(old, new):
    assert old in SOURCE
    at = SOURCE.rindex(old)
    sites = sites_of(SOURCE[:at] + new + SOURCE[at + len(old) :])
    assert sorted(site.status for site in sites) == [Status.MISSED, Status.ROUTED]
    assert all(not site.splices for site in sites if site.status is Status.MISSED)


def test_nothing_elsewhere():
    assert sites_of("class Model:\n    pass\n") == []


def test_upstreams_lines_all_stay():
    lines = iter(spliced(SOURCE, sites_of(SOURCE)).splitlines())
    assert all(line in lines for line in SOURCE.splitlines())
