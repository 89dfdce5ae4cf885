from __future__ import annotations

from types import ModuleType

import pytest

from tests.patches import fake_idiom
from veomni_hook.patches.idioms import recognise
from veomni_hook.tools.coverage import denominators, examine, totals

SOURCE = """
class First:
    def forward(self, x):
        return self.scale * x


class Second:
    def forward(self, x):
        return x / self.scale


class Third:
    def forward(x, scale):
        return x * scale


class FirstCall:
    def forward(self, x):
        return self.scale + x


class CallWithoutSelf:
    def forward(x, scale):
        return scale + x
"""


@pytest.fixture
def idioms(monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    """Replace the idioms by the one for tests."""
    found = [fake_idiom.module()]
    monkeypatch.setattr(recognise, "idioms", lambda *_: tuple(found))
    monkeypatch.setattr(recognise, "every_idiom", lambda: tuple(found))
    return found


def test_every_site_is_a_row_with_its_cause(idioms: list[ModuleType]) -> None:
    rows = [tuple(row.to_dict().values()) for row in examine("m", SOURCE) if row.counted]
    reason = "nearest times: expected Mult, found Div (line 8)"
    assert rows == [
        ("m", "First.forward", "scaling", "times", "routed", "", "", 0),
        ("m", "Second.forward", "scaling", "", "missed", reason, "other_form", 8),
        ("m", "Third.forward", "scaling", "times", "unbound", "no module at hand", "no_owner", 0),
    ]
    first = examine("m", SOURCE)[0].to_dict()
    assert [*first] == [*("module", "target", "op", "variant", "status", "reason", "code", "line")]


def test_totals_count_candidates_and_their_calls_apart(idioms: list[ModuleType]) -> None:
    whole, part = totals(examine("m", SOURCE))
    assert whole.to_dict() == {
        **{"op": "scaling", "candidates": 3, "routed": 1, "unbound": 1, "missed": 1, "share": 33.33},
        **{"call_sites": 2, "unbound_call_sites": 1, "no_kernel": 0, "refused": 0},
    }
    assert (part.op, part.candidates, part.routed, part.call_sites) == ("scaling/firsts", 1, 1, 1)
    (none,) = totals(examine("m", "x = 1\n"))
    assert (none.op, none.candidates, none.share) == ("scaling", 0, 100.0), "it lacks nothing"


@pytest.mark.parametrize("source", ["def f(:\n", "x = '\0'\n"])
def test_a_module_that_does_not_parse_is_an_error_row(idioms: list[ModuleType], source: str) -> None:
    (row,) = examine("m", source)
    assert (row.status, row.op, row.target) == ("error", "-", "-")
    assert "cannot be parsed" in row.reason
    assert [(total.op, total.candidates) for total in totals([row])] == [("scaling", 0)]


def test_an_idiom_that_raises_does_not_hide_the_others(idioms: list[ModuleType]) -> None:
    broken = fake_idiom.module()
    broken.__name__ = "veomni_hook.patches.idioms.broken"
    broken.OP = "breaking"  # type: ignore[attr-defined]

    def find(view: object) -> object:
        raise KeyError("nothing")

    broken.find = find  # type: ignore[attr-defined]
    idioms.insert(0, broken)
    rows = examine("m", SOURCE)
    assert [(row.op, row.reason) for row in rows if row.status == "error"] == [
        (
            "breaking",
            f"the idiom broken raised KeyError: 'nothing' (find, line {find.__code__.co_firstlineno + 1})",
        )
    ]
    assert sum(row.status == "routed" for row in rows) == 2


def test_a_failure_after_the_idioms_is_told_too(
    idioms: list[ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(document: object, *, optional: object) -> list[object]:
        raise RuntimeError("joined badly")

    monkeypatch.setattr(recognise, "recognise", fails)
    rows = examine("m", SOURCE)
    assert [row.reason for row in rows if row.status == "error"] == ["joined badly"]
    assert len(rows) == 6


def test_every_idiom_says_what_it_counts() -> None:
    for op, said in denominators().items():
        assert all(len(sentence.split()) > 3 for sentence in said), op
