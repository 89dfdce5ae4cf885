"""Text for nodes that stand nowhere as text.

Almost everything that the engine inserts is somebody's own text, cut out and put in again; this is for the
rest. astor wraps long lines where `ast.unparse` writes one, but does not round-trip every node (0.8.1 loses
annotated and walrus targets), so its rendering counts only if it parses back to the same tree.
"""

from __future__ import annotations

import ast

__all__ = ["render"]


def render(node: ast.expr | ast.stmt) -> str:
    """Return source text, without a newline at the end, that parses back to ``node``."""
    import astor

    try:
        text = str(astor.to_source(node)).strip("\n")
        kept = _dump(text, node) == ast.dump(node)
    except (AttributeError, SyntaxError, ValueError, TypeError):
        kept = False  # astor knows no node that came after Python 3.8
    return text if kept else ast.unparse(node)


def _dump(text: str, node: ast.expr | ast.stmt) -> str:
    (statement,) = ast.parse(text).body
    if isinstance(node, ast.expr) and isinstance(statement, ast.Expr):
        return ast.dump(statement.value)
    return ast.dump(statement)
