"""Parameters that a release renamed: one row each, and code that differs by names only is the same code."""

from __future__ import annotations

import pytest

from veomni_hook.tools.lock.changes import LINE, RENAMED, SIGNATURE, TEXT

from .conftest import Compare

OLD = """
from ..utils.deprecation import was


class Norm:
    def forward(self, x, past=None, **kwargs):
        seen = past.length() if past is not None else 0
        out = self.inner(x, past=past, key=kwargs["past"])
        return self.scale * out.past


class Other:
    @torch.no_grad()
    def forward(self, x, past=None):
        return self.scale * self.inner(x, past)
"""


def new(text: str = OLD, *, declared: bool = True) -> str:
    text = text.replace("past", "cache")
    decorator = '    @was("past", "5.40.0", new_name="cache")\n' if declared else ""
    return text.replace("    def forward", f"{decorator}    def forward").replace('"cache", "5', '"past", "5')


def rows(after: Compare, text: str, before: str = OLD) -> list[tuple[str, str, str]]:
    found = after(text, before=before)
    return [(one.result, one.target, one.detail) for one in found if one.result != LINE]


def test_one_row_for_all_functions(after: Compare) -> None:
    said = "past is cache now in 2 signatures; the old keyword still works until 5.40"
    assert rows(after, new()) == [(RENAMED, "past", said)]


def test_a_release_that_has_passed_is_not_named(after: Compare) -> None:
    ((_, _, said),) = rows(after, new().replace("5.40.0", "5.2.0"))
    assert said.endswith("; the old keyword still works")


def test_a_rename_that_nobody_declares_is_likely(after: Compare) -> None:
    before = OLD.replace('key=kwargs["past"]', "key=1").replace("out.past", "out")
    said = "past is likely cache now in 2 signatures; upstream does not take the old keyword"
    assert rows(after, new(before, declared=False), before) == [(RENAMED, "past", said)]


@pytest.mark.parametrize("kept", ["out.past", 'key=kwargs["past"]'])
def test_an_attribute_or_a_text_is_a_parameter_only_if_upstream_says_so(after: Compare, kept: str) -> None:
    other = {"out.past": "out", 'key=kwargs["past"]': "key=1"}
    before = OLD
    for text, instead in other.items():
        before = before.replace(text, instead) if text != kept else before
    found = rows(after, new(before, declared=False), before)
    assert sorted(one[:2] for one in found) == [(TEXT, "Norm.forward"), (RENAMED, "past")]


@pytest.mark.parametrize(
    ("old", "changed"),
    [
        ("cache=None, **kwargs", "cache=0, **kwargs"),
        ("x, cache=None, **kwargs", "x, *, cache=None, **kwargs"),
        ("x, cache=None, **kwargs", "x, other=None, cache=None, **kwargs"),
    ],
)
def test_a_parameter_with_another_default_or_place_is_another(after: Compare, old: str, changed: str) -> None:
    before = OLD[: OLD.index("class Other")]
    text = new(before, declared=False)
    assert old in text
    ((result, _, said),) = rows(after, text.replace(old, changed), before)
    assert result == SIGNATURE and said.startswith("no past any more; new: ")


@pytest.mark.parametrize(
    ("old", "changed"),
    [
        ("cache.length() if cache is not None", "cache.size() if cache is not None"),
        ("self.inner(x, cache=cache", "self.inner(cache, cache=x"),
        ("return self.scale * out.cache", "return self.scale * out.cache\n        x"),
        ("seen = cache.length() if cache", "seen = x.length() if cache"),
    ],
)
def test_what_else_changed_is_a_row_of_its_own(after: Compare, old: str, changed: str) -> None:
    assert old in new()
    found = rows(after, new().replace(old, changed))
    first, second = sorted(found)
    assert first == (TEXT, "Norm.forward", "what is routed computes the same") and second[0] == RENAMED
