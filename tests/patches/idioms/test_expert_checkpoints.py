import pytest

from tests.patches.idioms.applied import executed, sites_of, spliced
from veomni_hook.checkpoints import CheckpointError, loaded
from veomni_hook.patches.idioms.moe_experts import checkpoints as expert_checkpoints
from veomni_hook.patches.site import Status

SOURCE = """
def convert_and_load_state_dict_in_model(model, state_dict):
    model.append(state_dict)
    return model, None


def _load_state_dict_into_zero3_model(model, state_dict, config):
    model.append(state_dict)
    return [], model


class Model:
    @classmethod
    def from_pretrained(cls, read, zero3=False, **kwargs):
        output_loading_info = kwargs.pop("output_loading_info", False)
        model = kwargs.pop("calls", None)
        if zero3 is None:
            info = {"missing_keys": {"elsewhere"}}
        else:
            cls._load_pretrained_model(model, read, zero3)
            info = cls._finalize_model_loading(model, {"missing_keys": set()})
        if output_loading_info:
            return model, info
        return model

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


def test_finds_all_methods():
    assert [(site.target, site.status, site.counted) for site in sites_of(expert_checkpoints, SOURCE)] == [
        ("Model.from_pretrained", Status.ROUTED, False),
        ("Model._load_pretrained_model", Status.ROUTED, False),
        ("Model._finalize_model_loading", Status.ROUTED, False),
    ]


@pytest.mark.parametrize("zero3", [False, True])
def test_names_are_checked_before_anything_is_loaded(zero3):
    model = executed(SOURCE, sites_of(expert_checkpoints, SOURCE))["Model"]
    calls = []
    with pytest.raises(CheckpointError):
        model._load_pretrained_model(calls, {"experts.1.up_proj.weight": 0}, zero3)
    assert calls == []
    good = {"experts.0.up_proj.weight": 0}
    assert model._load_pretrained_model(calls, good, zero3) is calls
    assert calls == [good]


def test_the_report_is_checked_at_the_end(monkeypatch):
    checked = []
    monkeypatch.setattr(loaded, "after_loading", lambda model, info: checked.append((list(model), info)))
    model = executed(SOURCE, sites_of(expert_checkpoints, SOURCE))["Model"]
    assert model._finalize_model_loading([], "info") == "info"
    assert checked == [(["tied", "reported"], "info")]


GAP = {"experts.1.up_proj.weight": 0}


@pytest.mark.parametrize("zero3", [False, True])
def test_who_asks_for_the_list_gets_it_instead_of_the_error(zero3):
    model = executed(SOURCE, sites_of(expert_checkpoints, SOURCE))["Model"]
    _, info = model.from_pretrained(GAP, zero3, calls=[], output_loading_info=True)
    assert info == {"missing_keys": {"experts.0.up_proj"}}
    with pytest.raises(CheckpointError):
        model.from_pretrained(GAP, zero3, calls=[])
    with loaded.allow_incomplete_experts():
        _, info = model.from_pretrained(GAP, zero3, calls=[], output_loading_info=True)
    assert info == {"missing_keys": set()}


def test_a_load_that_fails_leaves_nothing_for_the_next():
    model = executed(SOURCE, sites_of(expert_checkpoints, SOURCE))["Model"]
    with pytest.raises(AttributeError):
        model.from_pretrained({}, calls=None, output_loading_info=True)
    with pytest.raises(CheckpointError):
        model.from_pretrained(GAP, calls=[])
    with pytest.raises(CheckpointError):
        loaded.check_names(GAP)


@pytest.mark.parametrize(
    ("old", "new", "missed"),
    [
        ('        output_loading_info = kwargs.pop("output_loading_info", False)\n', "", ["from_pretrained"]),
        (
            "        if zero3 is None:\n",
            "        if cls._load_pretrained_model is None:\n            pass\n        if zero3 is None:\n",
            ["from_pretrained"],
        ),
        ("= convert_and_load_state_dict_in_model(", "= convert_and_load(", ["_load_pretrained_model"]),
        ("state_dict=merged", "state_dict=dict(merged)", ["_load_pretrained_model"]),
        ("                model=model,\n", "", ["_load_pretrained_model"]),
        (
            "        return info\n\n",
            "        a = convert_and_load_state_dict_in_model(model=a, state_dict=b)\n\n",
            ["_load_pretrained_model"],
        ),
        ("        return info\n", "        return info, 1\n", ["from_pretrained", "_finalize_model_loading"]),
        ('            model.append("tied")', "            return info", ["from_pretrained", "_finalize_model_loading"]),
        ("_finalize_model_loading(model, info)", "_finalize_model_loading(self, info)", ["from_pretrained", "_finalize_model_loading"]),
    ],
)  # fmt: skip
def test_what_is_built_differently_is_a_miss(old, new, missed):
    assert old in SOURCE
    at = SOURCE.rindex(old)
    sites = sites_of(expert_checkpoints, SOURCE[:at] + new + SOURCE[at + len(old) :])
    assert [site.target.partition(".")[2] for site in sites if site.status is Status.MISSED] == missed
    assert all(not site.edits for site in sites if site.status is Status.MISSED)


def test_nothing_elsewhere():
    assert sites_of(expert_checkpoints, "class Model:\n    pass\n") == []


def test_upstreams_lines_all_stay():
    lines = iter(spliced(SOURCE, sites_of(expert_checkpoints, SOURCE)).splitlines())
    assert all(line in lines for line in SOURCE.splitlines())
