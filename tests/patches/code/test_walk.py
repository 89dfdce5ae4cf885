"""Walks over syntax trees."""

import ast
import gc
import weakref
from pathlib import Path

import pytest

from veomni_hook.patches.code import document
from veomni_hook.patches.code.tree import calls_in, child_nodes, contains, in_text_order, walk_ast
from veomni_hook.patches.idioms.recognise import recognise

LEFT_OUT = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
SOURCES = [document.__file__, ast.__file__, __file__]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: Path(path).name)
def test_the_nodes_of_ast_walk_in_its_order(path):
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    assert list(walk_ast(tree)) == [node for node in ast.walk(tree) if not isinstance(node, LEFT_OUT)]


def test_code_that_changes_is_walked_again():
    sum_ = ast.parse("a + b", mode="eval").body
    assert [node.id for node in walk_ast(sum_) if isinstance(node, ast.Name)] == ["a", "b"]
    sum_.right = ast.Name("c")
    assert [node.id for node in walk_ast(sum_) if isinstance(node, ast.Name)] == ["a", "c"]


def test_no_module_outlives_its_idioms():
    module = document.Document("def f(x, mask):\n    x[mask] = 0\n")
    function = weakref.ref(module.tree.body[0])
    assert recognise(module) == []
    del module
    gc.collect()
    assert function() is None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: Path(path).name)
def test_the_children_of_ast(path):
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        children = [each for each in ast.iter_child_nodes(node) if not isinstance(each, LEFT_OUT)]
        assert child_nodes(node) == children


def test_a_part_is_found_by_identity():
    statement = ast.parse("if a:\n    b = c + 1").body[0]
    inner = statement.body[0].value
    assert contains(statement, inner) and contains(inner, inner) and not contains(inner, statement)
    assert not contains(statement, ast.parse("c + 1", mode="eval").body)


def test_calls_level_by_level_and_in_text_order():
    tree = ast.parse("a(b(),\n  c())\nd[0](x)")
    assert [ast.unparse(call.func) for call in calls_in(tree)] == ["a", "d[0]", "b", "c"]
    assert [ast.unparse(call.func) for call in in_text_order(calls_in(tree))] == ["a", "b", "c", "d[0]"]
