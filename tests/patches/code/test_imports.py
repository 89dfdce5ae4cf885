import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.imports import import_anchor


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
def test_import_anchor(source, line):
    document = Document(source)
    anchor = import_anchor(document)
    assert (anchor == -1) if line is None else (document.lineno(anchor) == line and source[anchor] == "\n")
