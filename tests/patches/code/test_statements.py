from __future__ import annotations

import ast

import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.statements import blocks, import_anchor, module_statements, removal

SOURCE = """\
import a
try:
    import b
except ImportError:
    if a:
        b = 1
    else:
        b = 2
finally:
    c = 1
match a:
    case 1:
        d = 1
with a:
    e = 1
def f():
    hidden = 1
class A:
    hidden = 1
"""


def test_module_statements_stay_out_of_functions_and_classes() -> None:
    found = [
        ast.unparse(s) for s in module_statements(ast.parse(SOURCE)) if isinstance(s, ast.Assign | ast.Import)
    ]
    assert sorted(found) == ["b = 1", "b = 2", "c = 1", "d = 1", "e = 1", "import a", "import b"]


def test_blocks_hold_every_statement_once() -> None:
    tree = ast.parse(SOURCE)
    seen = [id(statement) for block in blocks(tree) for statement in block]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("source", "number", "attached", "expected"),
    [
        ("x = 1\ny = 2\nz = 3\n", 1, False, "x = 1\nz = 3\n"),
        ("x = 1\n# c\ny = 2  # d\nz = 3\n", 1, False, "x = 1\n# c\nz = 3\n"),
        ("x = 1\n# c\ny = 2  # d\nz = 3\n", 1, True, "x = 1\nz = 3\n"),
        ("x = 1\n\n\ny = 2\n\n\nz = 3\n", 1, True, "x = 1\n\n\nz = 3\n"),
        ("x = 1\ny = 2\n\n\nz = 3\n", 1, True, "x = 1\n\n\nz = 3\n"),
        ("x = 1; y = 2\n", 1, True, "x = 1; pass\n"),
        ("x = 1; y = 2\n", 0, True, "pass; y = 2\n"),
        ("x = 1\ny = 2", 1, True, "x = 1"),
    ],
)
def test_removal(source: str, number: int, attached: bool, expected: str) -> None:
    document = Document(source)
    start, end, text = removal(document, document.tree.body[number], needed=False, attached=attached)
    assert source[:start] + text + source[end:] == expected


def test_a_needed_statement_becomes_pass() -> None:
    document = Document("if 1:\n    x = (\n        1)  # c\n")
    start, end, text = removal(document, document.tree.body[0].body[0], needed=True)  # type: ignore[attr-defined]
    assert document.source[:start] + text + document.source[end:] == "if 1:\n    pass  # c\n"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = 1\n", None),
        ('"""D."""\nx = 1\n', 1),
        ("import a\nx = 1\nimport b\nclass A: pass\nimport c\n", 3),
        ("import a\nif a:\n    import b\nelse:\n    pass\nx = 1\n", 5),
        ("import a\nif a:\n    def f():\n        import b\n", 1),
        ("from a import (\n    b,\n)\nx = 1\n", 3),
    ],
)
def test_import_anchor(source: str, line: int | None) -> None:
    document = Document(source)
    anchor = import_anchor(document)
    assert (anchor == -1) if line is None else (document.lineno(anchor) == line and source[anchor] == "\n")
