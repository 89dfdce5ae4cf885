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


def exclude(patched, upstream, *names):
    return patched(upstream, f"config.exclude_from_output(*{names!r})").plain


def test_class_with_what_belongs_to_it(patched):
    plain = exclude(patched, UPSTREAM, "A")
    start, end = UPSTREAM.index("\n# about A"), UPSTREAM.index("\n# about f")
    assert plain == (UPSTREAM[:start] + UPSTREAM[end:]).replace('    "A",\n', "")


def test_everything(patched):
    plain = exclude(patched, UPSTREAM, "A", "f", "X", "a", "b", "g")
    assert plain == "import os\n\nif os:\n    pass\nelse:\n    pass\n\n__all__ = [\n]\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('__all__ = ["A", "B", "C"]', '__all__ = ["B", "C"]'),
        ('__all__ = ["A"]', "__all__ = []"),
        ('__all__ = "B", "A"', '__all__ = "B",'),
        ('__all__ = ("A",)', "__all__ = ()"),
        ('__all__ = []\n__all__ += ["A", "C"]', '__all__ = []\n__all__ += ["C"]'),
        ('__all__ = []\n__all__.extend(["A"])', "__all__ = []\n__all__.extend([])"),
        ('__all__: list = ["A"]', "__all__: list = []"),
        ('other = ["A"]', 'other = ["A"]'),
    ],
)
def test_all_is_filtered(patched, before, after):
    assert exclude(patched, f"class A: pass\n{before}\n", "A").strip() == after


def test_every_remaining_use_is_listed(patched):
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


def test_use_in_patch_code_is_listed_too(patched):
    code = "config.exclude_from_output('A')\n@config.add_helper\ndef h():\n    return A\n"
    with pytest.raises(ExcludedNameError, match="the code for h"):
        patched("import os\nclass A: pass\n", code)


@pytest.mark.parametrize("name", ["AA", "m"])
def test_name_that_is_not_defined(patched, name):
    with pytest.raises(PatchTargetError) as caught:
        exclude(patched, "import os\nclass A:\n    def m(self): pass\n", name)
    assert caught.value.target == name
    assert caught.value.nearest == (("A",) if name == "AA" else ())


def test_name_assigned_together_with_others(patched):
    with pytest.raises(PatchTargetError, match="together with b"):
        exclude(patched, UPSTREAM, "a")


def drop(patched, upstream, *names, more=""):
    return patched(upstream, f"config.drop_import_names(*{names!r})\n{more}").plain


@pytest.mark.parametrize(
    ("upstream", "names", "expected"),
    [
        ("from a import b, c, d\nx = 1\n", ["c"], "from a import b, d\nx = 1\n"),
        ("from a import b, c, d\n", ["c", "d"], "from a import b\n"),
        ("import a, b.c as d, e\n", ["d"], "import a, e\n"),
        ("import z\n\nfrom a import b  # why\n\n\nx = 1\n", ["b"], "import z\n\n\n\nx = 1\n"),
        (
            "from a import (\n    b,  # b\n    c,  # c\n    # about d\n    d,  # d\n)  # end\n",
            ["c"],
            "from a import (\n    b,  # b\n    # about d\n    d,  # d\n)  # end\n",
        ),
        ("from a import (\n    b, c,\n    d, e\n)\n", ["c", "e"], "from a import (\n    b, \n    d,\n)\n"),
        ("from a import (\n    b, c,\n    d, e\n)\n", ["b", "d"], "from a import (\n    c,\n    e\n)\n"),
        ("from a import b, \\\n    c\n", ["b"], "from a import \\\n    c\n"),
        ("if 1:\n    import a\nx = 1\n", ["a"], "if 1:\n    pass\nx = 1\n"),
        ("if 1:\n    import a\n    import b\nx = 1\n", ["a", "b"], "if 1:\n    pass\nx = 1\n"),
        (
            "try:\n    import a  # why\nexcept ImportError:\n    a = None\n",
            ["a"],
            "try:\n    pass  # why\nexcept ImportError:\n    a = None\n",
        ),
        ("import a; import b; x = 1\n", ["b"], "import a; pass; x = 1\n"),
        ("import z\r\nfrom a import b\r\nx = 1\r\n", ["b"], "import z\r\nx = 1\r\n"),
    ],
)
def test_names_are_dropped_and_the_rest_stays(patched, upstream, names, expected):
    assert drop(patched, upstream, *names) == expected


def test_imports_in_functions_stay(patched):
    upstream = "import a\ndef f():\n    import a\n    return a\n"
    assert drop(patched, upstream, "a") == "\ndef f():\n    import a\n    return a\n"


def test_name_that_is_not_imported(patched):
    with pytest.raises(PatchTargetError) as caught:
        drop(patched, "from typing import Optional\ndef f():\n    import Optinal\n", "Optinal")
    assert caught.value.nearest == ("Optional",)


def test_name_that_is_still_used(patched):
    upstream = "from a import b, c\nx = 1\n\ndef f(q: 'b'):\n    return b\n\ndef g(b): return b\n"
    with pytest.raises(PatchTargetError, match="still used 2 times") as caught:
        drop(patched, upstream, "b")
    assert "line 4 (f); line 5 (f)" in caught.value.where


@pytest.mark.parametrize(
    "provided",
    [
        "config.add_import('z', names=['b'])",
        "config.add_import('z')",
        "config.add_post_import_block('try:\\n    import b\\nexcept ImportError:\\n    b = None')",
        "@config.add_helper\ndef b(): pass",
    ],
)
def test_name_that_the_patches_provide(patched, provided):
    assert "return b" in drop(patched, "from a import b\ndef f():\n    return b\n", "b", more=provided)
