import ast
import re

import pytest

from tests.patches.tasks import task_of
from veomni_hook.errors import SignatureError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.spec import Patch, PatchType
from veomni_hook.patches.verbs.signature import check_signature


def check(before, after, *, owner="", calls="", body="", only_used=False):
    decorator = "@staticmethod\n" if owner == "static" else ""
    document = Document(f"{decorator}def f({before}): pass\n{calls}\n")
    keywords = re.search(r"\*\*(\w+)", after)
    body = body or (f"g(**{keywords[1]})" if keywords else "pass")
    original, replacement = document.tree.body[0], ast.parse(f"def f({after}): {body}").body[0]
    task = task_of(document, Patch(PatchType.FUNCTION_REPLACEMENT, "f", None), lenient=only_used)
    plan = task.plan
    check_signature(task, original, replacement, target="f", owner=owner)
    if plan.remarks:
        raise SignatureError(plan.remarks[0].what, where=plan.remarks[0].where, fix=plan.remarks[0].fix)


@pytest.mark.parametrize(
    ("before", "after", "owner"),
    [
        ("a, b, **kwargs", "a, b, c=1, **kwargs", ""),  # a caller may pass it, as upstream's callers could
        ("a, b=1", "*args", ""),
        ("a, *, b", "**kwargs", ""),
        ("self, a", "this, a", "C"),
        ("a, /, b", "a, b", ""),
        ("*args", "a, *args", ""),
    ],
)
def test_compatible(before, after, owner):
    check(before, after, owner=owner)


@pytest.mark.parametrize(
    ("before", "after", "owner", "named"),
    [
        ("a, b", "a", "", "drops b"),
        ("a, b", "a, *, c=1", "", "drops b, and has c, which nobody passes"),
        ("a, b", "b, a", "", "has a, b at other positions"),
        ("self, x, cache=None, **kwargs", "self, x, past=None, **kwargs", "C", r"nobody passes past to the replacement of f: upstream has cache \(for past\)"),
        ("x, mask, cache, **kw", "x, past_cache=None, mask=None, **kw", "", r"upstream has cache \(for past_cache\)"),
        ("a, **kwargs", "a", "", r"drops \*\*kwargs"),
        ("self, a", "a", "C", "drops a"),
        ("a", "b, a=1", "static", "needs .* b"),
        ("a", "a, b", "", "needs .* b"),
        ("a", "a, *, b", "", "needs .* b"),
    ],
)  # fmt: skip
def test_incompatible(before, after, owner, named):
    with pytest.raises(SignatureError, match=named) as caught:
        check(before, after, owner=owner)
    assert f"upstream: ({before}); replacement: ({after})" in caught.value.where
    assert "allow_signature_change" in caught.value.fix


@pytest.mark.parametrize(
    ("calls", "owner", "refused"),
    [
        ("f(1)", "", False), ("f(1, b=2)", "", True), ("f(*a, **k)", "", False),
        ("x.f(1, b=2)", "", False), ("x.f(1, b=2)", "C", True),
        ("f(1, b=2)", "C", False),
    ],
)  # fmt: skip
def test_only_used_ones_matter_to_patchgens_configs(calls, owner, refused):
    self = "self, " if owner else ""
    if refused:
        with pytest.raises(SignatureError, match="drops b"):
            check(f"{self}a, b=1", f"{self}a", owner=owner, calls=calls, only_used=True)
    else:
        check(f"{self}a, b=1", f"{self}a", owner=owner, calls=calls, only_used=True)


def test_calls_of_an_instance_count_for_forward():
    source = """
class C:
    def forward(self, a, b=1): pass
class D:
    def __init__(self):
        self.c = C()
    def forward(self):
        return self.c(1, b=2)
"""
    document = Document(source)
    original = document.find("C.forward")[0].node
    replacement = ast.parse("def forward(self, a): pass").body[0]
    task = task_of(document, Patch(PatchType.FUNCTION_REPLACEMENT, "f", None), lenient=True)
    check_signature(task, original, replacement, target="C.forward", owner="C")
    assert [remark.what for remark in task.plan.remarks] == ["the replacement of C.forward drops b"]


def test_unknown_keywords_need_kwargs():
    with pytest.raises(SignatureError, match=r"drops \*\*kwargs"):
        check("a, **kwargs", "a", calls="f(1, z=2)", only_used=True)
    check("a, **kwargs", "a", calls="f(1, **z)", only_used=True)
