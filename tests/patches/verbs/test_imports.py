from __future__ import annotations

from typing import Any

import pytest

from veomni_hook.errors import PatchTargetError


def drop(patched: Any, upstream: str, *names: str, more: str = "") -> str:
    return patched(upstream, f"config.drop_import_names(*{names!r})\n{more}").plain


@pytest.mark.parametrize(
    ("upstream", "names", "expected"),
    [
        ("from a import b, c, d\nx = 1\n", ["c"], "from a import b, d\nx = 1\n"),
        ("from a import b, c, d\n", ["c", "d"], "from a import b\n"),
        ("from a import b, c, d\n", ["b", "d"], "from a import c\n"),
        ("import a, b.c as d, e\n", ["d"], "import a, e\n"),
        ("import a, b.c, e\n", ["c"], "import a, e\n"),
        ("import z\nfrom a import b\nx = 1\n", ["b"], "import z\nx = 1\n"),
        ("import z\n\nfrom a import b  # why\n\n\nx = 1\n", ["b"], "import z\n\n\n\nx = 1\n"),
        ("from a import (b, c)  # why\n", ["c"], "from a import (b)  # why\n"),
        (
            "from a import (\n    b,  # b\n    c,  # c\n    # about d\n    d,  # d\n)  # end\n",
            ["c"],
            "from a import (\n    b,  # b\n    # about d\n    d,  # d\n)  # end\n",
        ),
        ("from a import (\n    b,\n    c\n)\n", ["c"], "from a import (\n    b,\n)\n"),
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
def test_names_are_dropped_and_the_rest_stays(
    patched: Any, upstream: str, names: list[str], expected: str
) -> None:
    assert drop(patched, upstream, *names) == expected


def test_imports_in_functions_stay(patched: Any) -> None:
    upstream = "import a\ndef f():\n    import a\n    return a\n"
    assert drop(patched, upstream, "a") == "\ndef f():\n    import a\n    return a\n"


def test_name_that_is_not_imported(patched: Any) -> None:
    with pytest.raises(PatchTargetError) as caught:
        drop(patched, "from typing import Optional\ndef f():\n    import Optinal\n", "Optinal")
    assert caught.value.nearest == ("Optional",)


def test_name_that_is_still_used(patched: Any) -> None:
    upstream = "from a import b, c\nx = 1\n\ndef f(q: 'b'):\n    return b\n\ndef g(b): return b\n"
    with pytest.raises(PatchTargetError, match="still used 2 times") as caught:
        drop(patched, upstream, "b")
    assert "line 4 (f); line 5 (f)" in caught.value.where


@pytest.mark.parametrize(
    "provided",
    [
        "config.add_import('z', names=['b'])",
        "config.add_import('z', names=['y as b'])",
        "config.add_import('z')",
        "config.add_post_import_block('try:\\n    import b\\nexcept ImportError:\\n    b = None')",
        "@config.add_helper\ndef b(): pass",
    ],
)
def test_name_that_the_patches_provide(patched: Any, provided: str) -> None:
    assert "return b" in drop(patched, "from a import b\ndef f():\n    return b\n", "b", more=provided)


def test_use_in_patch_code_counts(patched: Any) -> None:
    more = "@config.add_helper\ndef h():\n    return b\n"
    with pytest.raises(PatchTargetError, match="the code for h"):
        drop(patched, "from a import b\n", "b", more=more)


def test_all_dropped_names_are_reported(patched: Any) -> None:
    result = patched("from a import b, c\nimport d\n", "config.drop_import_names('b', 'c', 'd')")
    assert [(one.kind, one.target) for one in result.report.applied] == [("drop_import", n) for n in "bcd"]
