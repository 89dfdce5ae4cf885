import json

import pytest

from veomni_hook.patches.report import AppliedPatch, MissedSite, PatchReport, YieldedPatch
from veomni_hook.patches.spec import SlotSpec

REPORT = PatchReport(
    module="pkg.models.a.modeling_a",
    version="5.23.0",
    applied=(
        AppliedPatch("guard", "A.f", "Fast.", "conf:c", lines=(3, 7)),
        AppliedPatch("helper", "help", "Helps.", "conf:c", lines=(10, 10)),
        AppliedPatch("route", "C.f", "op/v: x=1", "idioms", lines=(11, 12), op="op", variant="v"),
        AppliedPatch("rewrite", "D.f", "Rewrites.", "conf:c", lines=(13, 13), declared="*.f"),
    ),
    yielded=(
        YieldedPatch("rewrite", "B.g", "conf:user patches B.g", "built:in"),
        YieldedPatch("route", "E.f", "conf:user patches E.f", "idioms", "op", "v"),
    ),
    untouched=("B", "C"),
    slots=(SlotSpec("slot", "rms_norm", "weight"), SlotSpec("other", "op", "v", "q, k")),
    missed=(MissedSite("op", "F.f", "missed", "expected +, found -"),),
)


def test_a_report_survives_json():
    assert PatchReport.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT
    assert PatchReport.from_dict(REPORT.to_dict()) == REPORT
    empty = PatchReport("m", "1", distribution="other")
    assert PatchReport.from_dict(json.loads(json.dumps(empty.to_dict()))) == empty


def test_what_only_some_entries_have_is_left_out_of_the_others():
    data = REPORT.to_dict()
    assert data["applied"][0] == {
        "kind": "guard",
        "target": "A.f",
        "reason": "Fast.",
        "config": "conf:c",
        "lines": (3, 7),
    }
    assert (data["applied"][2]["op"], data["applied"][2]["variant"]) == ("op", "v")
    assert "op" not in data["yielded"][0] and data["yielded"][1]["op"] == "op"
    assert data["slots"] == [
        {"name": "slot", "op": "rms_norm", "variant": "weight"},
        {"name": "other", "op": "op", "variant": "v", "parameters": "q, k"},
    ]


@pytest.mark.parametrize(
    "field", ["module", "version", "applied", "yielded", "untouched", "slots", "missed", "distribution"]
)
def test_an_incomplete_report_is_refused(field):
    data = REPORT.to_dict()
    del data[field]
    with pytest.raises(KeyError):
        PatchReport.from_dict(data)


def test_an_unknown_field_of_an_entry_is_refused():
    data = REPORT.to_dict()
    data["applied"] = [{**data["applied"][0], "more": 1}]
    with pytest.raises(TypeError):
        PatchReport.from_dict(data)


def test_moved_shifts_the_lines_of_applied_patches_only():
    moved = REPORT.moved(12)
    assert [patch.lines for patch in moved.applied] == [(15, 19), (22, 22), (23, 24), (25, 25)]
    assert REPORT.applied[0].lines == (3, 7)
    assert moved.moved(-12) == REPORT
