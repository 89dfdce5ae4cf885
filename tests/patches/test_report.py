from __future__ import annotations

import json

import pytest

from veomni_hook.patches.report import AppliedPatch, PatchReport, YieldedPatch, one_line
from veomni_hook.patches.spec import SlotSpec

REPORT = PatchReport(
    module="pkg.models.a.modeling_a",
    version="5.23.0",
    applied=(
        AppliedPatch("guard", "A.f", "Fast.", "conf:c", (3, 7)),
        AppliedPatch("helper", "help", "Helps.", "conf:c", (10, 10)),
    ),
    yielded=(YieldedPatch("rewrite", "B.g", "conf:user patches B.g", "built:in"),),
    untouched=("B", "C"),
    slots=(SlotSpec("slot", "rms_norm", "weight"),),
)


def test_a_report_survives_json() -> None:
    assert PatchReport.from_dict(json.loads(json.dumps(REPORT.to_dict()))) == REPORT
    assert PatchReport.from_dict(REPORT.to_dict()) == REPORT
    empty = PatchReport("m", "1", distribution="other")
    assert PatchReport.from_dict(json.loads(json.dumps(empty.to_dict()))) == empty


@pytest.mark.parametrize(
    "field", ["module", "version", "applied", "yielded", "untouched", "slots", "distribution"]
)
def test_an_incomplete_report_is_refused(field: str) -> None:
    data = REPORT.to_dict()
    del data[field]
    with pytest.raises(KeyError):
        PatchReport.from_dict(data)


def test_an_unknown_field_of_an_entry_is_refused() -> None:
    data = REPORT.to_dict()
    data["applied"] = [{**data["applied"][0], "more": 1}]
    with pytest.raises(TypeError):
        PatchReport.from_dict(data)


def test_moved_shifts_the_lines_of_applied_patches_only() -> None:
    moved = REPORT.moved(12)
    assert [patch.lines for patch in moved.applied] == [(15, 19), (22, 22)]
    assert REPORT.applied[0].lines == (3, 7)
    assert moved.moved(-12) == REPORT


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain", "plain"),
        ("two\n  lines\t\tand more ", "two lines and more"),
        ("a\x0cb\x00c\u2028d\x1b[0m", "a b c d [0m"),
        ("drop @use_experts_implementation here", "drop use_experts_implementation here"),
        ("a @ b, x@y", "a @ b, xy"),
        ("Größe 模型", "Größe 模型"),
        ("", ""),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line
    assert one_line(line) == line
