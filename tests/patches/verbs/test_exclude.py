from __future__ import annotations

from typing import Any

import pytest

from veomni_hook.errors import ExcludedNameError, PatchTargetError

UPSTREAM = """\
import os

# about A
@os.fspath
class A:
    pass  # end
    # of A


# about f
def f(): pass


X = 1
a, b = 1, 2
if os:
    def g(): pass
else:
    g = None

__all__ = [
    "A",
    "f",  # f
    "g",
]
"""


def exclude(patched: Any, upstream: str, *names: str) -> str:
    return patched(upstream, f"config.exclude_from_output(*{names!r})").plain


def test_class_with_what_belongs_to_it(patched: Any) -> None:
    plain = exclude(patched, UPSTREAM, "A")
    start, end = UPSTREAM.index("\n# about A"), UPSTREAM.index("\n# about f")
    assert plain == (UPSTREAM[:start] + UPSTREAM[end:]).replace('    "A",\n', "")


def test_everything(patched: Any) -> None:
    plain = exclude(patched, UPSTREAM, "A", "f", "X", "a", "b", "g")
    assert plain == "import os\n\nif os:\n    pass\nelse:\n    pass\n\n__all__ = [\n]\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('__all__ = ["A", "B", "C"]', '__all__ = ["B", "C"]'),
        ('__all__ = ["B", "A"]', '__all__ = ["B"]'),
        ('__all__ = ["A"]', "__all__ = []"),
        ('__all__ = ("B", "A")', '__all__ = ("B",)'),
        ('__all__ = "B", "A"', '__all__ = "B",'),
        ('__all__ = ("A",)', "__all__ = ()"),
        ('__all__ = []\n__all__ += ["A", "C"]', '__all__ = []\n__all__ += ["C"]'),
        ('__all__ = []\n__all__.extend(["A"])', "__all__ = []\n__all__.extend([])"),
        ('__all__: list = ["A"]', "__all__: list = []"),
        ('other = ["A"]', 'other = ["A"]'),
    ],
)
def test_all_is_filtered(patched: Any, before: str, after: str) -> None:
    assert exclude(patched, f"class A: pass\n{before}\n", "A").strip() == after


def test_every_definition_of_a_name_goes(patched: Any) -> None:
    upstream = "class A: pass\nA = staticmethod(A)\ny = 1\n"
    assert exclude(patched, upstream, "A").strip() == "y = 1"


def test_statement_that_shares_its_line(patched: Any) -> None:
    assert exclude(patched, "x = 1; y = 2; z = 3\n", "y") == "x = 1; pass; z = 3\n"


def test_every_remaining_use_is_listed(patched: Any) -> None:
    upstream = """\
class A: pass
class B(A):
    def m(self, x: "A") -> "list[A]":
        A = 1
        return A
    def n(self):
        def deep(): return A
        return [A for A in ()], lambda A: A
def f(x: A = None): "A"
A.x = 1
"""
    with pytest.raises(ExcludedNameError) as caught:
        exclude(patched, upstream, "A")
    assert caught.value.uses == (
        "line 2 (B)",
        "line 3 (B.m)",
        "line 3 (B.m)",
        "line 7 (B.n.<locals>.deep)",
        "line 9 (f)",
        "line 10 (module level)",
    )
    assert all(use in str(caught.value) for use in caught.value.uses)


def test_use_in_patch_code_is_listed_too(patched: Any) -> None:
    code = "config.exclude_from_output('A')\n@config.add_helper\ndef h():\n    return A\n"
    with pytest.raises(ExcludedNameError, match="the code for h"):
        patched("import os\nclass A: pass\n", code)


def test_use_in_what_is_excluded_too_is_fine(patched: Any) -> None:
    assert exclude(patched, "class A: pass\nclass B(A): pass\nx = 1\n", "A", "B") == "\nx = 1\n"


@pytest.mark.parametrize("name", ["AA", "os", "m"])
def test_name_that_is_not_defined(patched: Any, name: str) -> None:
    with pytest.raises(PatchTargetError) as caught:
        exclude(patched, "import os\nclass A:\n    def m(self): pass\n", name)
    assert caught.value.target == name
    assert caught.value.nearest == (("A",) if name == "AA" else ())


def test_name_assigned_together_with_others(patched: Any) -> None:
    with pytest.raises(PatchTargetError, match="together with b"):
        exclude(patched, UPSTREAM, "a")
