import ast

import pytest

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import apply_edits
from veomni_hook.patches.routes import guards
from veomni_hook.patches.routes.view import ModuleView


def view(text):
    return ModuleView(Document(text))


def edited(module, *edits, markers=True):
    return apply_edits(module.document.source, edits, markers=markers)


def function(module):
    return next(n for n in ast.walk(module.document.tree) if isinstance(n, ast.FunctionDef))


def test_after_body_at_its_end():
    module = view("def f(x):\n    if x:\n        x = 1  # c\n\n\ny = 2\n")
    wanted = "def f(x):\n    if x:\n        x = 1  # c\n    # [ROUTED] why\n    import a\n\n    a.go()\n\n\ny = 2\n"
    made = guards.after_body(module, function(module), "import a\n\na.go()", "why")
    assert edited(module, *made) == wanted
    short = view("def f(x): x = 1\n")
    with pytest.raises(ValueError, match="line 1 does not begin with the statement"):
        guards.after_body(short, function(short), "go()", "why")


def test_before_statement_at_its_indentation():
    module = view("def f(x):\n    if x:\n        # c\n        y = 1\n    return x\n")
    statement = function(module).body[0].body[0]
    edits = guards.before_statement(module, function(module), statement, "if x:\n    go()", "why @a")
    assert edited(module, *edits) == (
        "def f(x):\n    if x:\n        # [ROUTED] why a\n        if x:\n            go()\n"
        "        # c\n        y = 1\n    return x\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    a = 1; y = 2\n",
        "def f(x):\n    if x:\n        a = 1\n",
    ],
)
def test_no_statement_can_be_put_in_the_middle_of_a_line(text):
    module = view(text.replace("if x:\n        a = 1", "if x:\n        a = 1\n    elif y:\n        a = 2"))
    found = function(module)
    last = found.body[-1]
    if isinstance(last, ast.If):
        last = (last.orelse or last.body)[0]
    with pytest.raises(ValueError, match="does not begin"):
        guards.before_statement(module, found, last, "go()", "why")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a.b", "a.b"),
        ("a if b else c", "(a if b else c)"),
        ("(a) + (b)", "((a) + (b))"),
        ("(a + b)", "(a + b)"),
        ("-1", "(-1)"),
        ("(\n    a\n    or b\n)", "(\n    a\n    or b\n)"),
        ("lambda: 1", "(lambda: 1)"),
    ],
)
def test_in_place_is_one_operand_wherever_it_stands(text, written):
    module = view("y = -x ** 2\n")
    node = next(n for n in ast.walk(module.document.tree) if isinstance(n, ast.Name) and n.id == "x")
    result = edited(module, guards.in_place(module, node, text))
    assert result == f"y = -{written} ** 2\n"
    power = ast.parse(result).body[0].value.operand
    assert ast.dump(power.left) == ast.dump(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize("decorators", ["", "@a\n@b(1)\n"])
def test_decorate_goes_above_all_others(decorators):
    module = view(f"x = 1\n{decorators}class A: pass\n")
    edits = guards.decorate(module, module.classes["A"], "slot.reached", "why")
    assert edited(module, *edits) == f"x = 1\n# [ROUTED] why\n@slot.reached\n{decorators}class A: pass\n"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("return x", "kernel"),
        ("return [kernel for kernel in x]", "veomni_kernel"),
        ("return veomni_kernel(kernel)", "veomni_veomni_kernel"),
        ("return x.kernel", "kernel"),
    ],
)
def test_free_name(body, name):
    assert guards.free_name(function(view(f"def f(x):\n    {body}\n")), "kernel") == name
