from __future__ import annotations

import pytest

from tests.patches import fake_idiom
from veomni_hook.tools.lock import LINE
from veomni_hook.tools.lock.changes import (
    FORMULA,
    GONE,
    MOVED,
    NEW,
    NOT_ROUTED,
    SIGNATURE,
    TEXT,
    compare,
)

from .conftest import NORM, Compare, lock_of


def edited(old: str, new: str) -> str:
    assert old in NORM
    return NORM.replace(old, new)


@pytest.mark.parametrize(
    "text",
    [
        NORM,
        edited("# a comment", "# another"),
        edited("(self, x)", "(self, x: int) -> int"),
        edited("        # a comment\n", '        """Docstring."""\n'),
        edited("y", "z"),
    ],
)
def test_comments_annotations_docstrings_and_names_of_locals_are_no_change(after: Compare, text: str) -> None:
    assert after(text) == []


RENAMED_CLASS = edited("class Norm", "class RMSNorm")
NEW_SITE = f"{NORM}\n\nclass New:\n    def forward(self, x):\n        return self.scale + x\n"
FIRST = "--- m:Norm.forward (transformers 5.1.0)\n+++ m:Norm.forward (transformers 5.2.0)\n"


# What it is afterwards, by module; the result, whether it matters, its sentence, and parts of the diff.
@pytest.mark.parametrize(
    ("text", "result", "matters", "detail", "diff"),
    [
        (edited("y = double(x)", "y = (z := double(x))"), TEXT, False, "what is routed computes the same",
         [FIRST, "-    y = double(x)\n", "+    y = (z := double(x))\n"]),
        (edited("2 * x", "x * 2"), TEXT, False, "what is routed computes the same", ["--- m:double", "+    return x * 2"]),
        (edited("self.scale * y", "self.scale + y"), FORMULA, True, "it was times and is plus",
         ["-    return self.scale * y\n+    return self.scale + y\n"]),
        (edited("self.scale * y", "self.scale * y - x"), FORMULA, True, "it computes something else than before", ["- x"]),
        (NORM.partition("class")[0], GONE, True, "there is no Norm.forward", []),
        ({}, GONE, True, "the module is not there", []),
        (edited("self.scale * y", "y"), GONE, True, "Norm.forward is there, but nothing in it looks like scaling",
         ["+    return y\n"]),
        (edited("self.scale * y", "y / self.scale"), NOT_ROUTED, True, "nearest times: expected Mult, found Div (line 7)",
         ["+    return y / self.scale\n"]),
        (RENAMED_CLASS, MOVED, False, "it is now RMSNorm.forward", []),
        ({"m": "", "n": NORM}, MOVED, False, "it is now Norm.forward in n", []),
        ({"m2": edited("class Norm", "class M2Norm")}, MOVED, False, "it is now M2Norm.forward in m2", []),
        (RENAMED_CLASS.replace("y = double(x)", "y = (z := double(x))"), TEXT, False,
         "it is now RMSNorm.forward; what is routed computes the same", ["+    y = (z := double(x))"]),
        (f"import math\n{NORM}", LINE, False, "line 7 is now 8", []),
        (edited("(self, x)", "(self, x, eps=None)"), SIGNATURE, False,
         "new: eps=None; what is routed computes the same", ["+def forward(self, x, eps=None)"]),
        (NEW_SITE, NEW, False, "plus is routed here, and was not when the lock was written", []),
    ],
)  # fmt: skip
def test_what_changed(after: Compare, text, result: str, matters: bool, detail: str, diff: list[str]) -> None:
    (change,) = after(text)
    target = "New.forward" if result == NEW else "Norm.forward"
    assert (change.module, change.kind, change.target) == ("m", "scaling", target)
    assert (change.result, change.matters, change.detail) == (result, matters, detail)
    assert all(part in change.diff for part in diff) and bool(change.diff) is bool(diff)
    assert "--- m:double" not in change.diff or "m:Norm.forward" not in change.diff


def test_another_class_of_one_formula_elsewhere_is_not_the_one_that_is_gone(after: Compare) -> None:
    found = after({"m": "", "n": edited("class Norm", "class OtherThing")})
    assert [(change.module, change.result) for change in found] == [("m", GONE), ("n", NEW)]


def test_digests_of_another_engine_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    old = lock_of({"m": NORM})
    monkeypatch.setattr(fake_idiom, "SALT", "anew-")
    assert compare(old, lock_of({"m": NORM}, engine="other", old=old)) == []
    assert [c.result for c in compare(old, lock_of({"m": NORM}, engine="e", old=old))] == [FORMULA]
    (change,) = compare(
        old, lock_of({"m": edited("y = double(x)", "y = (z := double(x))")}, engine="other", old=old)
    )
    assert (change.result, change.matters) == (FORMULA, True)
    assert "another veomni-hook" in change.detail
    (moved,) = compare(old, lock_of({"m": edited("class Norm", "class It")}, engine="other", old=old))
    assert moved.result == MOVED
