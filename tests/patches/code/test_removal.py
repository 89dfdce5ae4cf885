import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import apply_edits, remove_items, remove_statement

gaps = st.sampled_from(["", " ", "\n", "\n    ", "  # c,\n", "\n# own line\n  "])


@st.composite
def lists(draw):
    count = draw(st.integers(1, 5))
    pieces = [f"{draw(gaps)}'{n}'{draw(gaps)}" for n in range(count)]
    last = draw(st.sampled_from([",", ""] if count > 1 else [","]))
    return ",".join(pieces) + last + draw(gaps), count


@given(lists(), st.sampled_from("[("), st.data())
def test_what_is_left_is_what_was_not_dropped(made, bracket, data):
    text, count = made
    source = f"x = {bracket}{text}{')' if bracket == '(' else ']'}\n"
    document = Document(source)
    value = document.tree.body[0].value
    dropped = data.draw(st.sets(st.integers(0, count - 1)))
    edits = remove_items(document, value.elts, dropped, lone_comma=bracket == "(")
    result = apply_edits(source, edits if dropped else [])
    left = [str(n) for n in range(count) if n not in dropped]
    assert list(ast.literal_eval(result.removeprefix("x = "))) == left
    assert isinstance(ast.parse(result).body[0].value, type(value))
    assert result.count("# own line") == source.count("# own line")


@pytest.mark.parametrize(
    ("source", "number", "attached", "expected"),
    [
        ("x = 1\n# c\ny = 2  # d\nz = 3\n", 1, False, "x = 1\n# c\nz = 3\n"),
        ("x = 1\n# c\ny = 2  # d\nz = 3\n", 1, True, "x = 1\nz = 3\n"),
        ("x = 1\n\n\ny = 2\n\n\nz = 3\n", 1, True, "x = 1\n\n\nz = 3\n"),
        ("x = 1\ny = 2\n\n\nz = 3\n", 1, True, "x = 1\n\n\nz = 3\n"),
        ("x = 1; y = 2\n", 1, True, "x = 1; pass\n"),
        ("x = 1\ny = 2", 1, True, "x = 1"),
    ],
)
def test_removal(source, number, attached, expected):
    document = Document(source)
    edit = remove_statement(document, document.tree.body[number], needed=False, attached=attached)
    assert apply_edits(source, [edit]) == expected


def test_a_needed_statement_becomes_pass():
    document = Document("if 1:\n    x = (\n        1)  # c\n")
    edit = remove_statement(document, document.tree.body[0].body[0], needed=True)
    assert apply_edits(document.source, [edit]) == "if 1:\n    pass  # c\n"
