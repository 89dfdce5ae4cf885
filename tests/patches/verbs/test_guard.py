import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.patches.conftest import LOSS_TAIL
from tests.patches.tasks import task_of
from veomni_hook.errors import PatchError, PatchTargetError
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import apply_edits
from veomni_hook.patches.spec import Patch, PatchType
from veomni_hook.patches.verbs.guard import plan_guard

Write = Callable[[str], Any]


@pytest.fixture
def write(tmp_path):
    """Write a function to its own file and return it, as if from a config module."""
    numbers = iter(range(1000))

    def written(text: str) -> Any:
        path = tmp_path / f"config_{next(numbers)}.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        namespace: dict[str, Any] = {"__name__": path.stem}
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
        return next(
            value for name, value in namespace.items() if callable(value) and not name.startswith("__")
        )

    return written


def planned(source, target, guard, *, before=None, digests=None, matches=1):
    """Patched text with and without markers."""
    document = Document(source, "pkg.mod")
    if digests is None:
        found = document.find(target)
        digests = tuple(fingerprint(definition.node) for definition in found)
    patch = Patch(
        PatchType.GUARD, target, guard, description="Why.", before=before, fingerprints=digests,
        matches=matches,
    )  # fmt: skip
    task = task_of(document, patch)
    plan_guard(task)
    edits = task.plan.finished()
    assert {edit.patch for edit in edits} == {0}
    text, plain = apply_edits(source, edits), apply_edits(source, edits, markers=False)
    compile(text, "text", "exec")
    compile(plain, "plain", "exec")
    return text, plain


SIMPLE = """\
class A(B):
    @deco
    def forward(self, x, *args, **kwargs):
        # upstream's comment
        y = x + 1
        return y  # kept
"""
GUARD = """
    def guard(self, x):
        'Not a part of it.'
        # the reason
        kernel = slot.kernel(self, x)
        if kernel is not None:

            return kernel(x)  # fast
"""


def test_a_guard_goes_in_front_of_the_body_and_changes_nothing_else(write):
    text, plain = planned(SIMPLE, "A.forward", write(GUARD))
    assert text == SIMPLE.replace(
        "        # upstream's comment\n        y",
        """\
        # [PATCHED METHOD] A.forward: Why. (conf:c)
        # the reason
        kernel = slot.kernel(self, x)
        if kernel is not None:

            return kernel(x)  # fast
        # upstream's comment
        y""",
    )
    marker = "        # [PATCHED METHOD] A.forward: Why. (conf:c)\n"
    assert text.count(marker) == 1 and plain == text.replace(marker, "")


PLACES = {
    "docstring": ('def f(x):\n    """Doc.\n\n    More."""\n\n    return x\n', 'More."""\n\n{m}{g}    return x\n'),
    "docstring only": ('def f(x):\n    """Doc."""\n', '"""\n{m}{g}'),
    "docstring only at the end of the text": ('def f(x):\n    """Doc."""', '"""  {M}\n{g}'),
    "comments": ("def f(x):\n    # c\n    # d\n    return x\n", "def f(x):\n{m}{g}    # c\n    # d\n    return x\n"),
    "string like a comment": ('def f(x):\n    """\n    # d"""\n    return x\n', '# d"""\n{m}{g}    return x\n'),
    "inline": ("def f(x): return x  # c\ny = 1\n", "def f(x):  {M}\n{g}    return x  # c\ny = 1\n"),
    "inline twice": ("def f(x): z = x; return z\n", "def f(x):  {M}\n{g}    z = x; return z\n"),
    "inline docstring": ('def f(x): "Doc."; return x\n', 'def f(x):\n    "Doc.";  {M}\n{g}    return x\n'),
    "inline docstring only": ('def f(x): "Doc."  # c\n', 'def f(x):\n    "Doc."  {M}\n{g}  # c\n'),
    "semicolon": ('def f(x):\n    "Doc."; return x\n', 'def f(x):\n    "Doc.";  {M}\n{g}    return x\n'),
    "decorated first": ("def f(x):\n    @d\n    def g(): pass\n    return g\n", "def f(x):\n{m}{g}    @d\n"),
    "conditional": ("if a:\n  def f(x):\n    return x\n", "  def f(x):\n{m}{g}    return x\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_every_form_of_body(name, write):
    source, wanted = PLACES[name]
    guard = write("def guard(x):\n    if slot:\n        return slot(x)\n")
    text, plain = planned(source, "f", guard)
    marker = "# [PATCHED FUNCTION] f: Why. (conf:c)"
    block = "    if slot:\n        return slot(x)\n"
    if name == "inline docstring only":
        # Here the marker is at the end of the line, and upstream's comment is on the guard's last line.
        block = block.rstrip("\n")
    assert wanted.format(m=f"    {marker}\n", M=marker, g=block).rstrip("\n") in text
    assert plain.count("PATCHED") == 0 and text.count(marker) == 1
    for value in ("return x", "return z", "return g", '"Doc."', "# c"):
        assert (value in source) == (value in text)


def test_tabs_crlf_and_form_feeds(write):
    guard = write("def guard(x):\n    if slot:\n        return '''a\n  b'''\n")
    source = "class A:\r\n\tdef f(self, x):\r\n\t\treturn x\r\n\x0c\r\nb = 1"
    text, _ = planned(source, "A.f", guard)
    assert text == (
        "class A:\r\n\tdef f(self, x):\r\n\t\t# [PATCHED METHOD] A.f: Why. (conf:c)\r\n"
        "\t\tif slot:\r\n\t\t    return '''a\r\n  b'''\r\n\t\treturn x\r\n\x0c\r\nb = 1"
    )
    namespace: dict[str, Any] = {"slot": True}
    exec(text, namespace)
    assert namespace["A"]().f(1) == "a\n  b"


LOSS = """\
class M:
    def forward(self, ids, labels=None, keep=0, **kwargs):
        outputs = self.model(ids)
        keep_from = slice(-keep, None)

        # about the logits:
        # only those needed
        logits = self.lm_head(outputs.last[:, keep_from, :])

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab, **kwargs)

        return Output(
            loss=loss,
            logits=logits,
            past=outputs.past,
            attentions=outputs.attentions,
        )
"""
LOSS_GUARD = """
    def guard(self, labels, hidden, loss_kwargs, output, fields):
        fused = slot.kernel(self, labels)  # not hidden
        if fused is not None:
            value, late = fused(self.lm_head, hidden, labels, hidden=1, **loss_kwargs)
            return output(loss=value, logits=late, **fields)
"""


def test_captures_of_before_are_put_in(write):
    text, plain = planned(LOSS, "M.forward", write(LOSS_GUARD), before=LOSS_TAIL)
    inserted = """\
        # [PATCHED METHOD] M.forward: Why. (conf:c)
        fused = slot.kernel(self, labels)  # not hidden
        if fused is not None:
            value, late = fused(self.lm_head, outputs.last[:, keep_from, :], labels, hidden=1, \
vocab_size=self.vocab, **kwargs)
            return Output(loss=value, logits=late, past=outputs.past, attentions=outputs.attentions)
"""
    at = LOSS.index("        # about the logits")
    assert text == LOSS[:at] + inserted + LOSS[at:]
    assert plain == text.replace(inserted.splitlines(keepends=True)[0], "")


def test_nested_functions_are_not_searched(write):
    source = "def f(x):\n    def g():\n        use(1)\n    return g\n"
    with pytest.raises(PatchTargetError, match="0 times"):
        planned(source, "f", write("def guard(v):\n    log(v)\n"), before="use({v})")


@pytest.mark.parametrize(
    ("source", "target", "nearest"),
    [(SIMPLE, "A.forwrad", "A.forward"), ("def g(): pass\n", "f", "")],
)
def test_a_missing_target_names_the_nearest(source, target, nearest, write):
    with pytest.raises(PatchTargetError) as caught:
        planned(source, target, write(GUARD), digests=("0" * 16,))
    assert caught.value.nearest == ((nearest,) if nearest else ()) and caught.value.target == target


def test_another_body_is_an_error_with_its_digest(write):
    digest = fingerprint(Document(SIMPLE).find("A.forward")[0].node)
    with pytest.raises(PatchTargetError) as caught:
        planned(SIMPLE, "A.forward", write(GUARD), digests=("0" * 16, "1" * 16))
    assert (
        digest in caught.value.what
        and digest in caught.value.fix
        and "line 3 of pkg.mod" in caught.value.what
    )
    with pytest.raises(PatchError) as missing:
        planned(SIMPLE, "A.forward", write(GUARD), digests=())
    assert digest in missing.value.fix


REFUSED = {
    "unknown parameter": ("def guard(self, z):\n    pass\n", r"neither .*\(none\): z"),
    "assigned parameter": (
        "def guard(self, x):\n    x = x.half()\n",
        "binds names that A.forward uses itself: x",
    ),
    "local of upstream": ("def guard(self):\n    y = 1\n    if y:\n        return y\n", "uses itself: y"),
    "global of upstream": ("def guard(self):\n    import abc as deco\n", "uses itself: deco"),
    "undeclared parameter": ("def guard(self):\n    return x\n", "not among its own parameters: x"),
    "yield": ("def guard(self):\n    yield 1\n", "cannot hold yield"),
    "global": ("def guard(self):\n    global q\n    q = 1\n", "cannot hold global"),
    "nothing": ("def guard(self):\n    'Only words.'\n", "no statements"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_disturb_upstream_is_refused(name, write):
    code, what = REFUSED[name]
    with pytest.raises(PatchError, match=what) as caught:
        planned(SIMPLE, "A.forward", write(code))
    assert caught.value.target == "A.forward" and caught.value.fix
    assert caught.value.where.startswith("m (d 1, m.py); declared in ")


REFUSED_CAPTURES = {
    "assigned": ("def guard(hidden):\n    hidden = 1\n", LOSS_TAIL, "assigns or shadows captured names: hidden"),
    "shadowed": ("def guard(hidden):\n    return [hidden for hidden in q]\n", LOSS_TAIL, "shadows captured names"),
    "misplaced": ("def guard(fields):\n    return fields\n", LOSS_TAIL, "is not valid in 'return fields'"),
    "undeclared": ("def guard(self):\n    return outputs\n", LOSS_TAIL, "not among its own parameters: outputs"),
    "ambiguous": ("def guard(labels):\n    return labels\n", "logits = self.lm_head({labels})", "could mean"),
    "no pattern": ("def guard(self):\n    return self\n", "f(", "not valid Python"),
    "no match": ("def guard(self):\n    return self\n", LOSS_TAIL.replace("None", "0"), "0 times"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_CAPTURES)
def test_captures_that_cannot_be_used_so_are_refused(name, write):
    code, before, what = REFUSED_CAPTURES[name]
    with pytest.raises(PatchError, match=what):
        planned(LOSS, "M.forward", write(code), before=before)


@pytest.mark.parametrize(
    "value",
    [
        "await x",
        "(y := x)",
    ],
)
def test_a_capture_that_must_run_once_is_refused(value, write):
    source = f"async def f(x):\n    use({value})\n"
    with pytest.raises(PatchError, match="cannot run twice"):
        planned(source, "f", write("def guard(v):\n    log(v)\n"), before="use({v})")
    text, _ = planned(source, "f", write("def guard():\n    log(1)\n"), before="use({v})")
    assert "log(1)" in text


@pytest.mark.parametrize("source", ["def f(x):\n    if x: use(x)\n", "def f(x):\n    y = 1; use(x)\n"])
def test_a_match_inside_a_line_is_refused(source, write):
    with pytest.raises(PatchError, match="no statement can be put before line 2"):
        planned(source, "f", write("def guard(v):\n    log(v)\n"), before="use({v})")
