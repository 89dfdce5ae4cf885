import ast

import pytest

from tests.patches.tasks import task_of
from veomni_hook.errors import PatchError, PatchTargetError
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.pattern import Capture
from veomni_hook.patches.spec import Patch, PatchType
from veomni_hook.patches.verbs.inplace import check_body, effects, marker, refuse_names, with_newlines
from veomni_hook.patches.verbs.targets import function_named

SOURCE = "def helper(x):\n    return x\n\nclass A:\n    def f(self):\n        return helper(self)\n"


def task(target="A.f", source=SOURCE, **options):
    options = {"description": "A reason\n  on two lines with @deco.", **options}
    return task_of(Document(source, "m"), Patch(PatchType.GUARD, target, None, **options))


def digest(target):
    return fingerprint(Document(SOURCE).find(target)[0].node)


def check(target="A.f", source=SOURCE, **options):
    checked = task(target, source, **options)
    check_body(checked, function_named(checked, "function", "method")[0])


def test_a_function_is_found_once_or_not_at_all():
    definition, node = function_named(task(), "function", "method")
    assert definition.qualname == "A.f" and isinstance(node, ast.FunctionDef)
    for target in ("A", "A.g", "g"):
        with pytest.raises(PatchTargetError):
            function_named(task(target), "function", "method")
    with pytest.raises(PatchTargetError, match="2 times"):
        function_named(task("f", "if a:\n    def f(): pass\nelse:\n    def f(): pass\n"), "function")


def test_body_and_reliances_are_checked():
    check()
    check(fingerprints=("0" * 16, digest("A.f")), relies_on={"helper": (digest("helper"),)})
    with pytest.raises(PatchTargetError, match=f"line 5 of m.*{digest('A.f')}"):
        check(fingerprints=("0" * 16,))
    with pytest.raises(PatchTargetError, match=f"helper.*{digest('helper')}"):
        check(relies_on={"helper": ("0" * 16,)})


def test_refuse_names_lists_them_sorted():
    refused = task()
    refuse_names(refused, [], "nothing", "f")
    with pytest.raises(PatchError, match="bad names: a, b") as caught:
        refuse_names(refused, {"b", "a"}, "bad names", "f")
    assert (caught.value.fix, caught.value.where, caught.value.target) == ("f", refused.where, "A.f")


def test_effects_looks_into_every_captured_node():
    nodes = ast.parse("g(1, a[b()])", mode="eval").body
    assert isinstance(nodes, ast.Call)
    assert effects(Capture("positionals", tuple(nodes.args)), (ast.Call,))
    assert not effects(Capture("expression", (nodes.args[0],)), (ast.Call,))


def test_the_marker_is_one_line_and_names_kind_target_reason_and_config():
    reason = "A reason on two lines with deco."
    for target, kind, described, told in (
        ("A.f", "METHOD", {}, reason),
        ("helper", "FUNCTION", {}, reason),
        ("A.f", "METHOD", {"description": None}, "guard of A.f"),
    ):
        marked = task(target, **described)
        definition, _ = function_named(marked, "function", "method")
        assert marker(marked, definition) == f"# [PATCHED {kind}] {target}: {told} (conf:c)"


def test_newlines_are_the_documents():
    assert with_newlines(Document("a = 1\r\n"), "b\nc\n") == "b\r\nc\r\n"
    assert with_newlines(Document("a = 1\n"), "b\nc\n") == "b\nc\n"


BASE = "def f(x, *, eps=1e-6):\n    y = x + 1\n    return g(y, eps)\n"


def digest_of(source):
    return fingerprint(Document(source).definitions()[0].node)


def test_relies_on_accepts_known_code():
    known = digest_of(BASE)
    check("f", BASE, relies_on={"f": (known,)})
    check("f", BASE, relies_on={"f": ("0" * 16, known)})


def test_relies_on_shows_the_new_digest():
    with pytest.raises(PatchTargetError) as caught:
        check("f", f"\n{BASE}", relies_on={"f": ("0" * 16,)})
    assert digest_of(BASE) in caught.value.what and digest_of(BASE) in caught.value.fix
    assert "line 2 of m" in caught.value.what and "0" * 16 in caught.value.what
    assert caught.value.where == task("f").where and caught.value.target == "f"


def test_relies_on_names_the_nearest_definitions():
    source = "def rotate_half(x): return x\n"
    with pytest.raises(PatchTargetError) as caught:
        check("rotate_half", source, relies_on={"rotate_haf": ("0" * 16,)})
    assert caught.value.nearest == ("rotate_half",) and "rotate_half" in caught.value.fix
    assert caught.value.target == "rotate_haf"


def test_relies_on_checks_every_definition_of_the_name():
    source = "if a:\n    def f(): return 1\nelse:\n    def f(): return 2\ndef g(): pass\n"
    first = digest_of("def f(): return 1\n")
    with pytest.raises(PatchTargetError, match="line 4"):
        check("g", source, relies_on={"f": (first,)})
