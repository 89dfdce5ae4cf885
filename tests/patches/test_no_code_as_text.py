"""No patching code compares code as text: layout and quotes would count, and names would be fixed."""

import ast
from pathlib import Path

import veomni_hook.patches

PACKAGE = Path(veomni_hook.patches.__file__).parent
SEARCHES = {"match", "fullmatch", "search", "startswith", "endswith", "partition", "rpartition"}


def is_text(node):
    return any(
        isinstance(part, ast.JoinedStr) or isinstance(getattr(part, "value", None), str)
        for part in ast.walk(node)
    )


def prints(node):
    """Whether an expression contains ``ast.unparse(…)``."""
    return any(isinstance(part, ast.Attribute) and part.attr == "unparse" for part in ast.walk(node))


def compares_text(node):
    """``ast.unparse(x) == "…"``, ``… in ("…",)``, ``pattern.match(ast.unparse(x))``, ``ast.unparse(x).startswith("…")``."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(map(prints, sides)) and any(is_text(side) for side in sides if not prints(side))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES:
        return any(map(prints, [node.func.value, *node.args]))
    return False


def found_in(text):
    return [ast.unparse(node) for node in ast.walk(ast.parse(text)) if compares_text(node)]


def test_no_patching_code_compares_code_as_text():
    files = {path: found_in(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert len(files) > 100
    assert {str(path.relative_to(PACKAGE)): found for path, found in files.items() if found} == {}
