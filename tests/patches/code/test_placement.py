import ast

import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import Edit, apply_edits, at_start, before


def parsed(text):
    document = Document(text)
    function = next(n for n in ast.walk(document.tree) if isinstance(n, ast.FunctionDef))
    return document, function


def filled(document, place):
    edits = [Edit(start, end, text) for start, end, text in place.splits]
    edits.append(Edit(place.start, place.start, place.comment("# c"), marker=True))
    edits.append(Edit(place.start, place.end, place.block(f"{place.indent}go()")))
    return apply_edits(document.source, edits)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("def f():\n  'd'", "def f():\n  'd'  # c\n  go()"),
        ("def f():\n  'd'\n", "def f():\n  'd'\n  # c\n  go()\n"),
        ("def f():\n  'd'; x\n", "def f():\n  'd';  # c\n  go()\n  x\n"),
        ("def f():\n\n  # a\n  # b\n  x\n", "def f():\n\n  # c\n  go()\n  # a\n  # b\n  x\n"),
        ("def f():\n # other\n  x\n", "def f():\n # other\n  # c\n  go()\n  x\n"),
        ("def f():\n  @d\n  def g(): pass\n", "def f():\n  # c\n  go()\n  @d\n  def g(): pass\n"),
    ],
)
def test_the_start_of_a_function(text, wanted):
    document, function = parsed(text)
    assert filled(document, at_start(document, function)) == wanted
    ast.parse(wanted)


def test_before_a_statement_and_its_comments():
    document, function = parsed("def f():\n  if a:\n    b\n    # why\n    c\n")
    (branch,) = function.body
    assert isinstance(branch, ast.If)
    place = before(document, function, branch.body[1])
    assert place is not None
    assert filled(document, place) == "def f():\n  if a:\n    b\n    # c\n    go()\n    # why\n    c\n"


def test_no_place_before_an_elif():
    document, function = parsed("def f():\n  if a:\n    b\n  elif c:\n    d\n")
    (branch,) = function.body
    assert isinstance(branch, ast.If)
    assert before(document, function, branch) is not None
    assert before(document, function, branch.orelse[0]) is None
