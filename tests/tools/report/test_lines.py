import random

import pytest

from veomni_hook.tools.report.diff import coloured
from veomni_hook.tools.report.lines import Kind, pairs, runs, split
from veomni_hook.tools.report.page import text

UPSTREAM = """\
def forward(self, x):
    y = self.norm(x)

    z = self.up(y)
    return z
"""
PATCHED = """\
def forward(self, x):
    # [ROUTED] a kernel
    if (kernel := slot.kernel(self, x)) is not None:
        z = kernel(x)
    else:
        y = self.norm(x)

        z = self.up(y)
    return z
"""


def test_code_that_moved_into_an_else_stands_beside_itself():
    left, right = split(UPSTREAM), split(PATCHED)
    found = [(str(pair.kind), pair.left, pair.right) for pair in pairs(left, right)]
    assert found == [
        ("same", 0, 0),
        *(("added", None, line) for line in (1, 2, 3, 4)),
        ("moved", 1, 5),
        ("same", 2, 6),
        ("moved", 3, 7),
        ("same", 4, 8),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_line_of_both_texts_is_there_once_and_in_order(seed):
    draw = random.Random(seed)
    left = [draw.choice(["", "a", " a", "bb", "  ccc", "dddd", ")"]) for _ in range(draw.randint(0, 30))]
    right = [line for line in left if draw.random() > 0.2]
    right.insert(draw.randint(0, len(right)), "new line")
    found = pairs(left, right)
    assert [pair.left for pair in found if pair.left is not None] == [*range(len(left))]
    assert [pair.right for pair in found if pair.right is not None] == [*range(len(right))]
    for pair in found:
        both = pair.left is not None and pair.right is not None
        assert (pair.kind is Kind.SAME) is (both and left[pair.left] == right[pair.right])
        assert (pair.kind is Kind.ADDED) is (pair.left is None)
    assert [pair for run in runs(found) for pair in run.pairs] == found


def test_unchanged_lines_away_from_changes_are_folded():
    left = [f"line {number}" for number in range(40)]
    right = [*left[:20], "new line", *left[20:]]
    found = runs(pairs(left, right))
    assert [(run.folded, len(run.pairs)) for run in found] == [(True, 17), (False, 7), (True, 17)]
    assert [run.folded for run in runs(pairs(left, left))] == [True]
    assert runs(pairs([], [])) == []


def test_lines_as_python_counts_them():
    assert split("a\r\nb\rc\n") == ["a", "b", "c"]
    assert split("a\x0cb\u2028c\n\nd") == ["a\x0cb\u2028c", "", "d"] and split("") == []


def test_colours_keep_the_text():
    lines = ["def f(self):  # a < b", '    """two', '    lines"""', "    return f'{1}' + x.print"]
    found = coloured(lines)
    assert found[0] == (
        '<span class="k">def</span> <span class="d">f</span>(<span class="b">self</span>):  '
        '<span class="t"># a &lt; b</span>'
    )
    assert found[1:3] == [
        '    <span class="s">&#34;&#34;&#34;two</span>',
        '<span class="s">    lines&#34;&#34;&#34;</span>',
    ]
    assert found[3].endswith("x.print") and '<span class="k">return</span>' in found[3]
    assert coloured(["a = (", "b < c"]) == [text("a = ("), text("b < c")]
