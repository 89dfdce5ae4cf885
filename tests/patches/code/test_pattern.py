import textwrap

import pytest

from tests.patches.conftest import LOSS_TAIL
from veomni_hook.errors import PatchError, PatchTargetError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.pattern import Pattern


def parsed(text):
    return Pattern(text, where="here", target="C.f")


def upstream(body):
    document = Document(
        "def f(self, x, **kwargs):\n" + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"
    )
    (function,) = document.tree.body
    return document, function


def captured(document, match):
    return {name: [document.text(node) for node in item.nodes] for name, item in match.captures.items()}


def one(pattern, body):
    document, function = upstream(body)
    compiled = parsed(pattern)
    found = compiled.find(function)
    assert len(found) == 1, found
    return captured(document, found[0])


def count(pattern, body):
    _, function = upstream(body)
    compiled = parsed(pattern)
    return len(compiled.find(function))


def test_a_loss_tail_matches_whatever_stands_in_its_holes():
    found = one(
        LOSS_TAIL,
        """
        hidden_states = outputs.last
        # keep some
        logits: T = self.lm_head(hidden_states[:, keep, :])

        loss = None  # none yet
        if labels is not None:
            loss = self.loss_function(
                labels=labels,
                vocab_size=self.config.vocab_size,
                logits=logits,
                **kwargs,
            )
        return Output(
            loss=loss,
            logits=logits,
            past=outputs.past,
        )
        """,
    )
    assert found == {
        "hidden": ["hidden_states[:, keep, :]"],
        "loss_kwargs": ["vocab_size=self.config.vocab_size", "**kwargs"],
        "output": ["Output"],
        "fields": ["past=outputs.past"],
    }


@pytest.mark.parametrize(
    "change",
    [
        ("loss = None", "loss = 0"),
        ("loss = None", "loss = None\nlog(loss)"),
        ("labels=labels", "labels=shifted"),
        ("    loss = self", "    pass\n    loss = self"),
        ("return Output(loss=loss, logits=logits)", "return"),
        ("logits=logits)", "logits=logits.float())"),
        ("loss=loss, logits=logits)", "logits, loss=loss)"),
        ("lm_head(h)", "lm_head(h, 1)"),
        ("lm_head(h)", "lm_head(*h)"),
        ("logits = self", "logits += self"),
        ("logits = self", "self.logits = self"),
    ],
)
def test_a_loss_tail_that_differs_does_not_match(change):
    body = (
        "logits = self.lm_head(h)\nloss = None\nif labels is not None:\n"
        "    loss = self.loss_function(logits=logits, labels=labels)\nreturn Output(loss=loss, logits=logits)"
    )
    assert count(LOSS_TAIL, body) == 1
    assert change[0] in body
    assert count(LOSS_TAIL, body.replace(*change)) == 0


@pytest.mark.parametrize(
    ("pattern", "body", "found"),
    [
        ("f({a}, *{rest})", "f(1, 2, *x)", {"a": ["1"], "rest": ["2", "*x"]}),
        ("f(*{rest}, {z})", "f(1, 2, 3)", {"rest": ["1", "2"], "z": ["3"]}),
        ("f(*{args}, **{kw})", "f(1, b=2, **c)", {"args": ["1"], "kw": ["b=2", "**c"]}),
        ("f(**{kw})", "f()", {"kw": []}),
        ("f(**{kw}, b={b})", "f(a=1, b=2, c=3)", {"kw": ["a=1", "c=3"], "b": ["2"]}),
        ("f(**given, **{kw})", "f(a=1, **given)", {"kw": ["a=1"]}),
        ("f({a}, {a})", "f(x [ 0 ], x[0])", {"a": ["x [ 0 ]"]}),
        ("{a} + {b}", "y = (c * d) + (e,)", {"a": ["c * d"], "b": ["(e,)"]}),
        ("x[{i}]", "x[:, 1:2]", {"i": [":, 1:2"]}),
        ("{module}.relu({x})", "nn.functional.relu(y)", {"module": ["nn.functional"], "x": ["y"]}),
        ("-{x}", "return torch.cat((-x2, x1), dim=-1)", None),
        ("lambda q: {e}", "map(lambda q: q + 1, x)", {"e": ["q + 1"]}),
    ],
)
def test_expression_patterns(pattern, body, found):
    if found is None:
        assert count(pattern, body) == 2  # -x2 and -1
    else:
        assert one(pattern, body) == found


@pytest.mark.parametrize(
    ("pattern", "body"),
    [
        ("f({a}, {a})", "f(x[0], x[1])"), ("f({a})", "f(*x)"), ("f({a})", "f(a=x)"), ("f({a})", "f(x, b=1)"),
        ("f({a}, *{rest}, {z})", "f(1)"), ("f(a={a}, a2={a})", "f(a=1, a2=2)"), ("f(1)", "f(True)"),
        ("f('1')", "f(b'1')"), 
        ("y", "y = 1\ny += 2\ndel y"), ("f(x)", "g(f'{f(x)}')"), ("f(x)", "y: f(x) = 1"),
    ],
)  # fmt: skip
def test_expressions_that_are_not_the_same_do_not_match(pattern, body):
    assert count(pattern, body) == 0


def test_a_keyword_that_fails_leaves_no_capture_behind():
    assert one("f(**{first}, a=g({x}))", "f(a=g(1), b=2)") == {"first": ["b=2"], "x": ["1"]}
    # Two spread mappings: the pattern's is the second one, and {x} must not stay bound to the first try.
    assert one("f(**g({x}, 2), **{rest})", "f(**g(1, 3), **g(4, 2))") == {"x": ["4"], "rest": ["**g(1, 3)"]}


def test_matches_come_in_the_order_of_the_text():
    document, function = upstream(
        "a = f(1)\nif x:\n    b = f(2)\n    while y: c = f(3)\nelse:\n    d = f(4)\n"
    )
    found = parsed("f({n})").find(function)
    assert [captured(document, match)["n"] for match in found] == [["1"], ["2"], ["3"], ["4"]]
    block = parsed("b = f({n})\nwhile y: c = f({m})")
    (match,) = block.find_statements(function)
    assert captured(document, match) == {"n": ["2"], "m": ["3"]}


BLOCKS = """
try:
    go(1)
except E:
    go(2)
else:
    go(3)
finally:
    go(4)
match x:
    case 1:
        go(5)
with y:
    go(6)
def inner():
    go(7)
    class D:
        go(8)
for i in x:
    go(9)
else:
    go(10)
"""


def test_every_block_is_searched_and_nested_scopes_on_demand():
    document, function = upstream(BLOCKS)
    pattern = parsed("go({n})")

    def numbers(*, nested: bool) -> list[str]:
        found = pattern.find_statements(function, nested=nested)
        return [captured(document, match)["n"][0] for match in found]

    assert numbers(nested=True) == [str(n) for n in range(1, 11)]
    assert numbers(nested=False) == ["1", "2", "3", "4", "5", "6", "9", "10"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("f(", "not valid Python"),
        ("{x} = 1", "not valid Python"),
        ("", "empty"),
        ("f(**{a}, **{b})", "remaining keywords twice"),
        ("f(*{a}, *{b})", "remaining positionals twice"),
        ("f({a}, **{a})", "captures a as keywords and as expression"),
        ("g(*{a})\nf(**{a})", "captures a as keywords and as positionals"),
    ],
)
def test_what_is_no_pattern_is_an_error(text, what):
    with pytest.raises(PatchError, match=what) as caught:
        parsed(text)
    assert caught.value.where == "here" and caught.value.target == "C.f" and caught.value.fix


def required(pattern, body, times=1):
    document, function = upstream(body)
    compiled = parsed(pattern)
    found = compiled.find(function)
    with pytest.raises(PatchTargetError) as caught:
        compiled.require(document, function, found, times)
    assert caught.value.target == "C.f" and caught.value.where == "here"
    return caught.value


def test_another_number_of_matches_is_an_error_with_count_and_lines():
    error = required("f({n})", "f(1)\ng()\nf(2)\n")
    assert "match once in C.f, it matches 2 times (line 2, 4)" in error.what
    assert "matches=2" in error.fix
    error = required("f({n})", "f(1)\n", times=3)
    assert "match 3 times in C.f, it matches once (line 2)" in error.what
    assert "match at least once in C.f, it matches 0 times" in required("g({n})", "f(1)\n", times=None).what


def test_no_match_tells_where_the_resemblance_ends():
    error = required("a()\nb()\nc()", "x()\na()\nb()\nd()\n")
    assert "0 times; only the first 2 of its 3 statements match, at line 3" in error.what
    error = required("rope({q}, {k})", "y = 1\nrope(q, k, 1)\n")
    assert "callee has other arguments at line 3" in error.what
    assert "matches=0" not in error.fix
    assert required("rope({q})", "y = 1\n").what.endswith("it matches 0 times")


def test_matches_that_reach_into_each_other_are_an_error():
    assert "overlap" in required("f({n})", "f(f(1))\n", times=2).what
    assert "overlap" in required("f({n})", "f(f(1))\n", times=None).what
    assert "overlap" in required("a()\na()", "a()\na()\na()\n", times=2).what


def test_the_span_of_a_match_holds_decorators():
    document, function = upstream("x = 1\n@deco\ndef g(): pass\ny = 2\n")
    (match,) = parsed("@deco\ndef g(): pass\ny = {v}").find_statements(function)
    start, end = match.span(document)
    assert document.source[start:end] == "@deco\n    def g(): pass\n    y = 2"
