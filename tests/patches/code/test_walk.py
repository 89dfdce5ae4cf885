"""Walks over syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from veomni_hook.patches.code import document
from veomni_hook.patches.code.walk import calls_in, child_nodes, contains, in_text_order, walk_ast

LEFT_OUT = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
SOURCES = [document.__file__, ast.__file__, __file__]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: Path(path).name)
def test_the_nodes_of_ast_walk_in_its_order(path) -> None:
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    assert list(walk_ast(tree)) == [node for node in ast.walk(tree) if not isinstance(node, LEFT_OUT)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: Path(path).name)
def test_the_children_of_ast(path) -> None:
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        children = [each for each in ast.iter_child_nodes(node) if not isinstance(each, LEFT_OUT)]
        assert child_nodes(node) == children


def test_a_part_is_found_by_identity() -> None:
    statement = ast.parse("if a:\n    b = c + 1").body[0]
    inner = statement.body[0].value  # type: ignore[attr-defined]
    assert contains(statement, inner) and contains(inner, inner) and not contains(inner, statement)
    assert not contains(statement, ast.parse("c + 1", mode="eval").body)


def test_calls_level_by_level_and_in_text_order() -> None:
    tree = ast.parse("a(b(),\n  c())\nd[0](x)")
    assert [ast.unparse(call.func) for call in calls_in(tree)] == ["a", "d[0]", "b", "c"]
    assert [ast.unparse(call.func) for call in in_text_order(calls_in(tree))] == ["a", "b", "c", "d[0]"]
