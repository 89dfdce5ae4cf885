import ast
from itertools import pairwise

import pytest

from tests.patches.tasks import task_of
from tests.patches.upstream import modeling_file, modeling_files
from veomni_hook.errors import PatchError, PatchTargetError
from veomni_hook.patches.code.comparison import fingerprint, serialise
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import apply_edits
from veomni_hook.patches.code.pattern import Pattern
from veomni_hook.patches.spec import Patch, PatchType
from veomni_hook.patches.verbs.rewrite import plan_rewrite


def planned(source, pattern, replacement, *, target="f", matches=1, digests=()):
    """Rewritten text with and without markers."""
    document = Document(source, "pkg.mod")
    patch = Patch(
        PatchType.REWRITE, target, None, description="Why.", pattern=pattern, replacement_text=replacement,
        matches=matches, fingerprints=digests,
    )  # fmt: skip
    task = task_of(document, patch)
    plan_rewrite(task)
    edits = task.plan.finished()
    assert {edit.patch for edit in edits} == {0}
    text, plain = apply_edits(source, edits), apply_edits(source, edits, markers=False)
    compile(text, "text", "exec")
    assert text.count("[PATCHED") == 1 and "[PATCHED" not in plain
    return text, plain


ATTENTION = """\
class Attention:
    def forward(self, x, position_embeddings, cache=None):
        query = self.q_proj(x)  # the query
        cos, sin = position_embeddings
        query, key = rope(query, key, cos, sin)  # rotated
        if cache is not None:
            key = cache.update(key)
        return query, key
"""


def test_a_call_is_rewritten_and_nothing_else():
    text, plain = planned(
        ATTENTION,
        "rope({q}, {k}, {cos}, {sin})",
        "(slot.kernel(self, {q}, {k}) or rope)({q}, {k}, {cos}, {sin})",
        target="Attention.forward",
    )
    old = "        query, key = rope(query, key, cos, sin)  # rotated\n"
    new = "        query, key = (slot.kernel(self, query, key) or rope)(query, key, cos, sin)  # rotated\n"
    assert plain == ATTENTION.replace(old, new)
    assert text == ATTENTION.replace(
        old, f"        # [PATCHED METHOD] Attention.forward: Why. (conf:c)\n{new}"
    )


EXPRESSIONS = [
    # upstream, pattern, replacement, result
    ("y = g(x) * 2", "g({a})", "{a} + 1", "y = (x + 1) * 2"),
    ("y = g(x)", "g({a})", "{a} if c else d", "y = x if c else d"),
    ("y = g(x).z", "g({a})", "{a} if c else d", "y = (x if c else d).z"),
    ("y = -g(x + 1)", "g({a})", "{a} * 2", "y = -((x + 1) * 2)"),
    ("y = g(x, 1, *z, b=2)", "g({a}, *{rest}, **{kw})", "h({a}, *{rest}, c=3, **{kw})", "y = h(x, 1, *z, c=3, b=2)"),
    ("y = (g)(x)", "g", "h", "y = (h)(x)"),
    ("y = 'ü', g('ñ')", "g({a})", "h({a})", "y = 'ü', h('ñ')"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "pattern", "replacement", "result"), EXPRESSIONS)
def test_expressions(line, pattern, replacement, result):
    _, plain = planned(f"def f(x):\n    {line}\n", pattern, replacement)
    assert plain == f"def f(x):\n    {result}\n"


def test_a_replacement_on_several_lines_is_indented_like_its_statement():
    _, plain = planned(
        "class A:\n  def f(self, x):\n    if x:\n        y = g(x)\n",
        "g({a})",
        """
        (
            slot.kernel(self, {a})
            or g
        )({a})
        """,
        target="A.f",
    )
    assert plain == (
        "class A:\n  def f(self, x):\n    if x:\n        y = (\n            slot.kernel(self, x)\n"
        "            or g\n        )(x)\n"
    )


MARKED = [
    # upstream's lines, number of the line of the marker
    ("def f(x):\n    if x and (\n        g(x)\n    ):\n        pass\n", 2),
    ("def f(x):\n    if x:\n        pass\n    elif g(x):\n        pass\n", 4),
    ("def f(x):\n    y = '''\n    '''; g(x)\n", 2),
    ("@d\ndef f(x): return g(x)\n", 1),
    ("def f(x):\n    return [\n        g(x)\n        for i in x\n    ]\n", 2),
    ("def f(x):\n    @d(g(x))\n    def h(): pass\n", 2),
    ("def f(x):\n    for i in x:\n        def h():\n            return g(x)\n", 4),
]


@pytest.mark.parametrize(("source", "line"), MARKED)
def test_the_marker_never_falls_into_code(source, line):
    text, plain = planned(source, "g(x)", "h(x)")
    lines = text.splitlines(keepends=True)
    assert lines[line - 1].strip() == "# [PATCHED FUNCTION] f: Why. (conf:c)"
    assert "".join(lines[: line - 1] + lines[line:]) == plain == source.replace("g(x)", "h(x)")


STATEMENTS = """\
def f(x):
    if x:
        a = first(x)  # one
        b: int = second(a)
        # between
        c = third(b)  # three
    return x
"""


def test_statements_give_way_to_statements():
    _, plain = planned(
        STATEMENTS,
        "b = second({v})\nc = third(b)",
        """
        if slot:
            c = fused('''
  kept''', {v})
        else:
            c = third(second({v}))
        """,
    )
    assert plain == (
        "def f(x):\n    if x:\n        a = first(x)  # one\n"
        "        if slot:\n            c = fused('''\n  kept''', a)\n        else:\n            c = third(second(a))  # three\n"
        "    return x\n"
    )


REFUSED: dict[str, tuple[str, str, str, str]] = {
    "no replacement": ("g(x)", "g(x)", "h(", "replacement is not valid Python"),
    "empty replacement": ("g(x)", "g(x)", "", "has to be one expression"),
    "statement for expression": ("g(x)", "g(x)", "y = 1", "has to be one expression"),
    "nothing for statements": ("y = g(x)", "y = g(x)", "# none", "has to be statements"),
    "unknown capture": ("g(x)", "g({a})", "h({b})", r"does not make \(a\): b"),
    "capture misplaced": ("g(x, b=1)", "g(x, **{kw})", "h({kw})", "keyword arguments here"),
    "shadowing": ("g(x + n)", "g({a})", "[{a} for n in z]", "binds names that f uses itself: n"),
    "shadowing in statements": ("y = g(x + n)", "y = g({a})", "y = [{a} for n in z]", "hides names .* uses: n"),
    "twice": ("g(h(x))", "g({a})", "k({a}, {a})", "more than once: a"),
    "keyword twice": ("g(x, b=1)", "g(x, **{kw})", "h(b=2, **{kw})", "passes b twice"),
    "part of a line": ("z = 1; y = g(x)", "y = g(x)", "y = 2", "share a line"),
    "inline": ("if z: y = g(x)", "y = g(x)", "y = 2", "share a line"),
    "target of a deletion": ("y = g(x)", "y", "2", "0 times"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rewritten_is_refused(name):
    line, pattern, replacement, what = REFUSED[name]
    with pytest.raises(PatchError, match=what) as caught:
        planned(f"def f(x):\n    {line}\n", pattern, replacement)
    assert caught.value.target == "f" and "declared in" in caught.value.where and caught.value.fix


def test_target_body_and_number_are_checked():
    source = "def f(x):\n    return g(x)\n"
    digest = fingerprint(Document(source).definitions()[0].node)
    assert planned(source, "g(x)", "h(x)", digests=(digest,))[1] == "def f(x):\n    return h(x)\n"
    with pytest.raises(PatchTargetError, match=digest):
        planned(source, "g(x)", "h(x)", digests=("0" * 16,))
    with pytest.raises(PatchTargetError, match=r"nearest.*: f"):
        planned(source, "g(x)", "h(x)", target="ff")
    with pytest.raises(PatchTargetError, match=r"match 2 times in f, it matches once \(line 2\)"):
        planned(source, "g(x)", "h(x)", matches=2)


IDENTITIES = ["{x}.transpose({a}, {b})", "nn.Linear(*{a}, **{k})", "torch.cat({a}, **{k})"]


def rewrite_to_itself(path):
    """Rewrite every match in every function of a module to itself, one function at a time."""
    source = path.read_text(encoding="utf-8")
    document = Document(source)
    same = serialise(document.tree)
    rewritten = 0
    for definition in document.definitions():
        node = definition.node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for text in IDENTITIES if len(document.find(definition.qualname)) == 1 else []:
            found = Pattern(text, where="here").find(node)
            spans = [match.span(document) for match in found]
            if not found or any(end > start for (_, end), (start, _) in pairwise(spans)):
                continue
            patch = Patch(PatchType.REWRITE, definition.qualname, None, pattern=text, replacement_text=text)
            patch.matches = len(found)
            task = task_of(document, patch)
            plan_rewrite(task)
            plain = apply_edits(source, task.plan.edits, markers=False)
            assert serialise(ast.parse(plain)) == same, (path, definition.qualname, text)
            rewritten += 1
    return rewritten


def test_rewriting_code_to_itself_changes_nothing():
    assert rewrite_to_itself(modeling_file("qwen3")) >= 4


@pytest.mark.slow
def test_rewriting_installed_code_to_itself_changes_nothing():
    paths = modeling_files()
    assert sum(map(rewrite_to_itself, paths[:: max(1, len(paths) // 20)])) > 100
