import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import at_start

SAMPLE = '''\
"""Module."""
import os
X: int = 1
A, (B, *C) = range(3), []


@first
# between
@(
    # an @ in a comment
    second
)
class K(object):
    """Doc."""

    attr = "ä"; other = "ö"

    @property
    def p(self): return self._p

    @p.setter
    def p(self, v): self._p = v

    @p.deleter
    def p(self): del self._p

    class Inner:
        async def m(self):
            def deep(): pass
            local = 1
            return deep


if X:
    def maybe(): "doc"
else:
    try:
        from a import maybe
    except ImportError:
        def maybe():
            return 2  # why
            # and more

            # still deeper
        # not deeper

for i in X:
    with i as j:
        match j:
            case 1:
                def matched(): pass
'''


def node(document, name, number=0):
    return document.find(name)[number].node


def test_every_definition_has_its_qualname_and_kind():
    found = [(d.qualname, d.kind, d.accessor) for d in Document(SAMPLE).definitions()]
    assert found == [
        ("X", "assignment", ""),
        ("A", "assignment", ""),
        ("B", "assignment", ""),
        ("C", "assignment", ""),
        ("K", "class", ""),
        ("K.attr", "assignment", ""),
        ("K.other", "assignment", ""),
        ("K.p", "method", ""),
        ("K.p.setter", "method", "setter"),
        ("K.p.deleter", "method", "deleter"),
        ("K.Inner", "class", ""),
        ("K.Inner.m", "method", ""),
        ("K.Inner.m.<locals>.deep", "function", ""),
        ("maybe", "function", ""),
        ("maybe", "function", ""),
        ("matched", "function", ""),
    ]


def test_locals_may_be_left_out():
    document = Document(SAMPLE)
    assert document.find("K.Inner.m.deep") == document.find("K.Inner.m.<locals>.deep") != []
    assert document.find("nothing") == []


def test_span_takes_decorators_in_with_their_at():
    document = Document(SAMPLE)
    text = document.text(node(document, "K"))
    assert text.startswith("@first\n# between") and text.endswith("return deep")
    assert SAMPLE[document.start(node(document, "K")) :].startswith("class K")
    lone = Document("@(\n    # an @ in a comment\n    second\n)\nclass K: pass")
    assert lone.span(lone.tree.body[0]) == (0, len(lone.source))


@given(st.text(alphabet="a\n\r\f\t é𝒳", max_size=30), st.integers(0, 30))
def test_lines_agree_with_pythons(text, offset):
    document = Document("'''" + text + "'''")
    offset = min(offset, len(document.source))
    assert document.line_start(offset) <= offset <= document.next_line(offset)
    assert document.line_start(offset) <= document.line_end(offset) <= document.next_line(offset)
    assert document.end(document.tree.body[0]) == len(document.source)
    assert document.lineno(len(document.source)) == document.tree.body[0].end_lineno


def test_full_end_takes_what_belongs_to_the_body():
    document = Document(SAMPLE)
    last = node(document, "maybe", 1)
    assert SAMPLE[document.end(last) : document.full_end(last)].split("\n") == [
        "  # why",
        "            # and more",
        "",
        "            # still deeper",
    ]
    attr = node(document, "K.attr")
    assert document.full_end(attr) == document.end(attr)  # more code follows on the line


@pytest.mark.parametrize(
    ("source", "inline", "expected"),
    [
        ("def f():\n    return 1\n", False, "    return 1\n"),
        ('def f():\n    """d"""', False, ""),
        ("def f():\n    @a\n    def g(): pass\n", False, "    @a\n    def g(): pass\n"),
        ("def f(): return 1\n", True, None),
        ('def f():\n    """d"""; return 1\n', True, None),
    ],
)
def test_where_a_block_goes(source, inline, expected):
    document = Document(source)
    function = document.tree.body[0]
    assert document.is_inline(function) is inline
    if expected is not None:
        assert source[at_start(document, function).start :] == expected


def test_nodes_without_position_are_refused():
    with pytest.raises(ValueError, match="no position"):
        Document("x").start(ast.Load())
