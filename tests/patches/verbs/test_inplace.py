from __future__ import annotations

import ast

import pytest

from veomni_hook.errors import PatchError, PatchTargetError
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.pattern import Capture
from veomni_hook.patches.spec import Patch, PatchType
from veomni_hook.patches.verbs.inplace import (
    check_body,
    check_relies_on,
    effects,
    find_function,
    marker,
    refuse_names,
    with_newlines,
)

SOURCE = "def helper(x):\n    return x\n\nclass A:\n    def f(self):\n        return helper(self)\n"


def patch(target: str = "A.f", **options: object) -> Patch:
    made = Patch(PatchType.GUARD, target, None, description="A reason\n  on two lines with @deco.")
    for name, value in options.items():
        setattr(made, name, value)
    return made


def digest(target: str) -> str:
    return fingerprint(Document(SOURCE).find(target)[0].node)


def test_a_function_is_found_once_or_not_at_all() -> None:
    definition, node = find_function(Document(SOURCE), patch(), "here")
    assert definition.qualname == "A.f" and isinstance(node, ast.FunctionDef)
    for target in ("A", "A.g", "g"):
        with pytest.raises(PatchTargetError):
            find_function(Document(SOURCE), patch(target), "here")
    with pytest.raises(PatchTargetError, match="2 times"):
        find_function(Document("if a:\n    def f(): pass\nelse:\n    def f(): pass\n"), patch("f"), "here")


def test_body_and_reliances_are_checked() -> None:
    document = Document(SOURCE, "m")
    definition, _ = find_function(document, patch(), "here")
    check_body(document, definition, patch(), "here")
    known = patch(fingerprints=("0" * 16, digest("A.f")), relies_on={"helper": (digest("helper"),)})
    check_body(document, definition, known, "here")
    with pytest.raises(PatchTargetError, match=f"line 5 of m.*{digest('A.f')}"):
        check_body(document, definition, patch(fingerprints=("0" * 16,)), "here")
    with pytest.raises(PatchTargetError, match=f"helper.*{digest('helper')}"):
        check_body(document, definition, patch(relies_on={"helper": ("0" * 16,)}), "here")


def test_refuse_names_lists_them_sorted() -> None:
    refuse_names([], "nothing", fix="f", where="w", target="t")
    with pytest.raises(PatchError, match="bad names: a, b") as caught:
        refuse_names({"b", "a"}, "bad names", fix="f", where="w", target="t")
    assert (caught.value.fix, caught.value.where, caught.value.target) == ("f", "w", "t")


def test_effects_looks_into_every_captured_node() -> None:
    nodes = ast.parse("g(1, a[b()])", mode="eval").body
    assert isinstance(nodes, ast.Call)
    assert effects(Capture("positionals", tuple(nodes.args)), (ast.Call,))
    assert not effects(Capture("expression", (nodes.args[0],)), (ast.Call,))


def test_the_marker_is_one_line_and_names_kind_target_reason_and_config() -> None:
    document = Document(SOURCE)
    method, _ = find_function(document, patch(), "here")
    function, _ = find_function(document, patch("helper"), "here")
    reason = "A reason on two lines with deco."
    assert marker(method, patch(), "m:c") == f"# [PATCHED METHOD] A.f: {reason} (m:c)"
    assert marker(function, patch("helper"), "") == f"# [PATCHED FUNCTION] helper: {reason}"
    assert marker(method, patch(description=None), "m:c") == "# [PATCHED METHOD] A.f: guard of A.f (m:c)"


def test_newlines_are_the_documents() -> None:
    assert with_newlines(Document("a = 1\r\n"), "b\nc\n") == "b\r\nc\r\n"
    assert with_newlines(Document("a = 1\n"), "b\nc\n") == "b\nc\n"


BASE = "def f(x, *, eps=1e-6):\n    y = x + 1\n    return g(y, eps)\n"


def digest_of(source: str) -> str:
    return fingerprint(Document(source).definitions()[0].node)


def test_relies_on_accepts_known_code() -> None:
    document = Document(BASE, "m")
    known = digest_of(BASE)
    check_relies_on(document, {}, "here")
    check_relies_on(document, {"f": known}, "here")
    check_relies_on(document, {"f": ["0" * 16, known]}, "here")


def test_relies_on_shows_the_new_digest() -> None:
    with pytest.raises(PatchTargetError) as caught:
        check_relies_on(Document(f"\n{BASE}", "m"), {"f": ["0" * 16]}, "here")
    assert digest_of(BASE) in caught.value.what and digest_of(BASE) in caught.value.fix
    assert "line 2 of m" in caught.value.what and "0" * 16 in caught.value.what
    assert caught.value.where == "here" and caught.value.target == "f"


def test_relies_on_names_the_nearest_definitions() -> None:
    with pytest.raises(PatchTargetError) as caught:
        check_relies_on(Document("def rotate_half(x): return x\n", "m"), {"rotate_haf": ["0" * 16]}, "here")
    assert caught.value.nearest == ("rotate_half",) and "rotate_half" in caught.value.fix


def test_relies_on_checks_every_definition_of_the_name() -> None:
    source = "if a:\n    def f(): return 1\nelse:\n    def f(): return 2\n"
    first = digest_of("def f(): return 1\n")
    with pytest.raises(PatchTargetError, match="line 4"):
        check_relies_on(Document(source, "m"), {"f": [first]}, "here")
