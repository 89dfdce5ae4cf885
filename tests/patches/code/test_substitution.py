import ast

from veomni_hook.patches.code.comparison import means
from veomni_hook.patches.code.tree import substituted, swapped


def expression(text):
    return ast.parse(text, mode="eval").body


def test_swapped_copies_and_leaves_the_tree_alone():
    tree = ast.parse("f(a, b)\ng()")
    call = tree.body[0].value
    assert isinstance(call, ast.Call)
    new = swapped(tree, {id(call.args[0]): (), id(tree.body[1]): tuple(ast.parse("x\ny").body)})
    assert ast.unparse(new) == "f(b)\nx\ny"
    assert ast.unparse(tree) == "f(a, b)\ng()"
    assert means("f(b)\nx ; y", new) and not means("f(b)", new) and not means("f(", new)


def test_names_stand_for_expressions():
    node = expression("a + b.a[a]")
    assert substituted(node, {"c": expression("1")}) is node
    assert ast.unparse(substituted(node, {"a": expression("x.y")})) == "x.y + b.a[x.y]"
    assert ast.unparse(node) == "a + b.a[a]"
