import pytest

from tests.patches.tasks import task_of
from veomni_hook.errors import PatchTargetError
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.spec import Patch, PatchType
from veomni_hook.patches.verbs.inplace import check_body, marker
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


def test_body_and_reliances_are_checked():
    check()
    check(fingerprints=("0" * 16, digest("A.f")), relies_on={"helper": (digest("helper"),)})
    with pytest.raises(PatchTargetError, match=f"line 5 of m.*{digest('A.f')}"):
        check(fingerprints=("0" * 16,))
    with pytest.raises(PatchTargetError, match=f"helper.*{digest('helper')}"):
        check(relies_on={"helper": ("0" * 16,)})


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


def digest_of(source):
    return fingerprint(Document(source).definitions()[0].node)


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
