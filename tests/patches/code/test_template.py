"""Templates: holes, choices between statements, and the difference that is reported."""

import ast

import pytest

from tests.patches.upstream import source_of
from veomni_hook.patches.code.template import Found, Mismatch, Template, branches
from veomni_hook.patches.graph import Scope


def found(template, code, **names):
    return Template(template).find([ast.parse(code).body], **names)


@pytest.mark.parametrize(
    ("template", "code", "expected"),
    [
        ("Y = self.PART(X)", "a = self.norm(b)", {"PART": "norm"}),
        ("Y = f(X, *REST, **MORE)", "a = f(b, c, *d, e=1, **g)", {"REST": "c, *d", "MORE": "e=1, **g"}),
        ("Y = f(dim=DIM, x=X)", "a = f(x=b, dim=-1)", {"X": "b", "DIM": "-1"}),
        ("for I in ROWS:\n    Y.append(I)", "for a in b:\n    c.append(a)", {"I": "a", "ROWS": "b", "Y": "c"}),
        ("def f(self, X): return X", "def f(self, a: int):\n    'Docstring.'\n    return a", {"X": "a"}),
        ("...\nY = 1", "a()\nb = 2\nc = 1", {"Y": "c"}),
        ("Y = 1\n...", "c = 1\na()", {"Y": "c"}),
        ("if maybe:\n    Y = 1\nZ = 2", "b = 2", {"Y": "", "Z": "b"}),
        ("if maybe:\n    Y = 1\nZ = 2", "a = 1\nb = 2", {"Y": "a", "Z": "b"}),
        ("if either:\n    Y = 1\nelse:\n    Y = 2\n    Z = 3", "a = 2\nb = 3", {"Y": "a", "Z": "b"}),
        ("while some:\n    Y = 1\n    Z = 2\nR = Y", "a = 2\nb = 1\nc = b", {"Y": "b", "Z": "a"}),
        # Two statements of one form: which is which follows from what comes later.
        ("while some:\n    Y = s[I]\n    Z = s[J]\nR = Y - Z", "a = s[0]\nb = s[1]\nc = b - a", {"Y": "b", "J": "0"}),
        ("if TEST: ...", "if a > 1:\n    b()\n    c()", {"TEST": "a > 1"}),
    ],
)  # fmt: skip
def test_what_holes_stand_for(template, code, expected):
    result = found(template, code)
    assert isinstance(result, Found), result
    assert {hole: result[hole] for hole in expected} == expected


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("Y = X + X", "a = b + c"),
        ("Y = X.sum()", "a, b = c.sum()"),
        ("Y = self.PART(X)", "a = other.norm(b)"),
        ("Y = f(X)", "a = f(*b)"),
        ("Y = 'TEXT'", "a = 'text'"),
        ("if TEST: ...", "if a:\n    b()\nelse:\n    c()"),
        ("X = 0\nwhile some:\n    Y = 1\n    Y = 2", "c = 0\na = 1\nb = 2"),
        ("if maybe:\n    Y = x.keys()\nuse(Y)", "use(anything)"),
        ("Y = 1", "a = 1\nb()"),
        ("if either:\n    Y = 1\nelse:\n    Y = 2", "a = 3"),
    ],
)
def test_what_is_not_matched(template, code):
    assert isinstance(found(template, code), Mismatch)


def test_functions_of_torch_have_any_name_that_a_module_gives_them():
    template = Template("Y = torch.cat(X, dim=1)")
    scope = Scope(ast.parse("import torch\nfrom torch import cat as joined\ndef cat(): ..."))
    for text in ("torch.cat", "joined"):
        code = [ast.parse(f"a = {text}(b, dim=1)").body]
        assert isinstance(template.find(code, scope.dotted), Found)
    assert isinstance(template.find([ast.parse("a = cat(b, dim=1)").body], scope.dotted), Mismatch)


def test_a_hole_for_names_alone():
    template = Template("Y = f(X)", names="X")
    assert isinstance(template.find([ast.parse("a = f(b)").body]), Found)
    assert isinstance(template.find([ast.parse("a = f(b.c)").body]), Mismatch)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_5_omni"])
def test_upstreams_code_is_a_template_of_itself(family):
    nodes = ast.walk(ast.parse(source_of(family)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 30
    for function in functions:
        template = Template("\n".join(map(ast.unparse, function.body)))
        result = template.find([function.body])
        assert isinstance(result, Found) and result.index == 0, function.name
        # One statement less, or in another order, is other code.
        assert isinstance(template.find([function.body[:-1]]), Mismatch)
        if len(function.body) > 1 and ast.dump(function.body[0]) != ast.dump(function.body[1]):
            swapped = [function.body[1], function.body[0], *function.body[2:]]
            assert isinstance(template.find([swapped]), Mismatch)


def test_a_parameter_is_known_before_it_is_assigned_again():
    template = "Y = f(X)\nX = cast(X)"
    assert isinstance(found(template, "a = f(b)\nb = cast(b)"), Mismatch)
    result = found(template, "a = f(b)\nb = cast(b)", X="b")
    assert isinstance(result, Found) and result["Y"] == "a"
    assert isinstance(found(template, "a = f(c)\nc = cast(c)", X="b"), Mismatch)


def test_the_difference_is_the_furthest_statement_after_one_that_matched():
    template = "Y = f(X)\nfor I in Y:\n    if maybe:\n        skip(I)\n    use(I, X)\nreturn Y"
    code = "a = f(b)\nc = f(b)\nfor i in c:\n    skip(i)\n    use(i, c)\nreturn c"
    result = found(template, code)
    assert isinstance(result, Mismatch) and result.node is not None
    assert (str(result), result.node.lineno) == ("use(i, c) in place of use(I, X)", 5)
    assert str(found(template, "g()")) == "nothing more in place of Y = f(X)"
    assert str(found("Y = 1", "a = 1\nb()")) == "b() in place of the end"


def test_one_statement_and_one_expression():
    loop = ast.parse("for a in b:\n    c(a * 2)").body[0]
    template = Template("for I in ROWS: ...")
    assert (result := template.match(loop)) is not None and result.first is loop
    product = Template("X * 2")
    assert [one["X"] for node in ast.walk(loop) if (one := product.match(node))] == ["a"]


def test_blocks_that_run_at_most_once():
    code = "a()\nif b:\n    c()\n    if d:\n        e()\nelse:\n    for f in g:\n        h()"
    texts = [
        [ast.unparse(each).splitlines()[0] for each in block] for block in branches(ast.parse(code).body)
    ]
    assert texts == [["a()", "if b:"], ["c()", "if d:"], ["e()"], [], ["for f in g:"]]
