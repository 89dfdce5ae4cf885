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


def test_the_same_code_is_no_change(after: Compare) -> None:
    assert after(NORM) == []


@pytest.mark.parametrize(
    "text",
    [
        edited("# a comment", "# another"),
        edited("(self, x)", "(self, x: int) -> int"),
        edited("        # a comment\n", '        """Docstring."""\n'),
        edited("y", "z"),
    ],
)
def test_comments_annotations_docstrings_and_names_of_locals_are_no_change(after: Compare, text: str) -> None:
    assert after(text) == []


def test_code_that_computes_the_same_is_only_text(after: Compare) -> None:
    (change,) = after(edited("y = double(x)", "y = (z := double(x))"))
    assert (change.result, change.matters) == (TEXT, False)
    assert (change.module, change.kind, change.target) == ("m", "scaling", "Norm.forward")
    assert "-    y = double(x)\n" in change.diff and "+    y = (z := double(x))\n" in change.diff
    assert change.diff.startswith(
        "--- m:Norm.forward (transformers 5.1.0)\n+++ m:Norm.forward (transformers 5.2.0)\n"
    )


def test_a_changed_helper_of_a_site_shows_in_the_diff(after: Compare) -> None:
    (change,) = after(edited("2 * x", "x * 2"))
    assert change.result == TEXT
    assert "m:double" in change.diff and "+    return x * 2" in change.diff
    assert "m:Norm.forward" not in change.diff


def test_another_formula_matters(after: Compare) -> None:
    (change,) = after(edited("self.scale * y", "self.scale + y"))
    assert (change.result, change.matters) == (FORMULA, True)
    assert change.detail == "it was times and is plus"
    assert "-    return self.scale * y\n+    return self.scale + y\n" in change.diff


def test_another_form_of_one_variant_matters(after: Compare) -> None:
    (change,) = after(edited("self.scale * y", "self.scale * y - x"))
    assert (change.result, change.matters) == (FORMULA, True)


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


def test_a_site_that_is_gone(after: Compare) -> None:
    (change,) = after(NORM.partition("class")[0])
    assert (change.result, change.matters) == (GONE, True)
    assert change.detail == "there is no Norm.forward" and change.diff == ""


def test_a_module_that_is_gone(after: Compare) -> None:
    (change,) = after({})
    assert (change.result, change.detail) == (GONE, "the module is not there")


def test_a_definition_that_does_not_look_like_the_op_any_more(after: Compare) -> None:
    (change,) = after(edited("self.scale * y", "y"))
    assert (change.result, change.matters) == (GONE, True)
    assert "nothing in it looks like scaling" in change.detail and "+    return y\n" in change.diff


def test_a_site_that_is_not_routed_any_more(after: Compare) -> None:
    (change,) = after(edited("self.scale * y", "y / self.scale"))
    assert (change.result, change.matters) == (NOT_ROUTED, True)
    assert "expected Mult, found Div" in change.detail
    assert "+    return y / self.scale\n" in change.diff


def test_a_class_with_another_name_has_moved(after: Compare) -> None:
    (change,) = after(edited("class Norm", "class RMSNorm"))
    assert (change.result, change.matters, change.diff) == (MOVED, False, "")
    assert change.detail == "it is now RMSNorm.forward"


def test_a_class_in_another_module_has_moved(after: Compare) -> None:
    (change,) = after({"m": "", "n": NORM})
    assert (change.result, change.matters) == (MOVED, False)
    assert change.detail == "it is now Norm.forward in n"


def test_another_class_of_one_formula_elsewhere_is_not_the_one_that_is_gone(after: Compare) -> None:
    found = after({"m": "", "n": edited("class Norm", "class OtherThing")})
    assert [(change.module, change.result) for change in found] == [("m", GONE), ("n", NEW)]


def test_the_classes_of_a_renamed_module_have_moved_with_it(after: Compare) -> None:
    (change,) = after({"m2": edited("class Norm", "class M2Norm")})
    assert (change.result, change.detail) == (MOVED, "it is now M2Norm.forward in m2")


def test_a_renamed_class_with_another_text_shows_its_diff(after: Compare) -> None:
    text = edited("class Norm", "class RMSNorm").replace("y = double(x)", "y = (z := double(x))")
    (change,) = after(text)
    assert (change.result, change.matters) == (TEXT, False)
    assert "it is now RMSNorm.forward" in change.detail and "+    y = (z := double(x))" in change.diff


def test_other_lines_are_told_apart(after: Compare) -> None:
    (change,) = after("import math\n" + NORM)
    assert (change.result, change.matters, change.diff) == (LINE, False, "")
    assert change.detail == "line 7 is now 8"


def test_another_signature_of_a_site_is_worth_a_note(after: Compare) -> None:
    (change,) = after(edited("(self, x)", "(self, x, eps=None)"))
    assert (change.result, change.matters) == (SIGNATURE, False)
    assert change.detail.startswith("new: eps=None; ") and change.diff


def test_a_new_site_is_mentioned(after: Compare) -> None:
    text = NORM + "\n\nclass New:\n    def forward(self, x):\n        return self.scale + x\n"
    (change,) = after(text)
    assert (change.target, change.result, change.matters) == ("New.forward", NEW, False)
    assert "plus" in change.detail
