import pytest

from veomni_hook.errors import PatchError
from veomni_hook.patches.code.captures import substitute
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.pattern import Pattern


def captures_of(pattern, code):
    upstream = Document(f"def f():\n    {code}\n")
    function = upstream.tree.body[0]
    (match,) = Pattern(pattern, where="here").find(function)
    return upstream, dict(match.captures)


def put(text, pattern, code, *, holes=False):
    upstream, captures = captures_of(pattern, code)
    return substitute(Document(text), captures, upstream, holes=holes, where="here", target="C.f")


def expression(text, captured):
    """``text`` with the name `h` replaced by an expression."""
    return put(text, "take(a={h})", f"take(a={captured})")


@pytest.mark.parametrize(
    ("text", "captured", "result"),
    [
        ("y = g(h, h)", "x[:, i, :]", "y = g(x[:, i, :], x[:, i, :])"),
        # brackets only if the meaning requires them
        ("y = h.shape", "a + b", "y = (a + b).shape"),
        ("y = h * 2", "a + b", "y = (a + b) * 2"),
        ("y = h + 2", "a + b", "y = a + b + 2"),
        ("y = 2 - h", "a - b", "y = 2 - (a - b)"),
        ("y = h if h else 1", "a if b else c", "y = (a if b else c) if (a if b else c) else 1"),
        ("y = h.real", "1", "y = (1).real"),
        ("y = h()", "lambda: 1", "y = (lambda: 1)()"),
        ("y = g(*h)", "a or b", "y = g(*a or b)"),
        ("y = g(**h)", "a or b", "y = g(**a or b)"),
        ("y = h", "(a\n  + b)", "y = (a\n  + b)"),
        ("y = h", "(a  # first\n  .b)", "y = (a  # first\n  .b)"),
        ("y = {h: h}", "a or b", "y = {a or b: a or b}"),
        # names only: no strings, comments, attributes, keywords
        ("y = g('h', h=h).h  # h", "x", "y = g('h', h=x).h  # h"),
        ("y = 'ü', h; z = 'é', h", "ñ", "y = 'ü', ñ; z = 'é', ñ"),
        ("h.data = 1\nh[0] = 2", "x", "x.data = 1\nx[0] = 2"),
        ("def g():\n    return h", "x", "def g():\n    return x"),
    ],
)
def test_expressions(text, captured, result):
    assert expression(text, captured) == result


def test_a_captured_tuple_without_brackets():
    assert put("y = h", "x[{h}]", "x[a, b]") == "y = a, b"
    assert put("y = g(h)", "x[{h}]", "x[a, b]") == "y = g((a, b))"
    assert put("y = z[h]", "x[{h}]", "x[:, i]") == "y = z[:, i]"
    assert put("y = z[h]", "x[{h}]", "x[1:]") == "y = z[1:]"


@pytest.mark.parametrize(
    ("text", "call", "result"),
    [
        ("g(x, **kw)", "take(b=1, **c)", "g(x, b=1, **c)"),
        ("g(x, **kw)", "take()", "g(x)"),
        ("g(x, **kw, a=1)", "take()", "g(x, a=1)"),
        ("g(**kw)", "take()", "g()"),
        ("g(**kw,)", "take()", "g()"),
        ("g(\n    x,  # why, so\n    **kw,\n)", "take()", "g(\n    x,  # why, so\n)"),
        ("g(\n    x,  # why, so\n    **kw\n)", "take()", "g(\n    x  # why, so\n    \n)"),
    ],
)
def test_keywords(text, call, result):
    assert put(text, "take(**{kw})", call) == result


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("g(*rest, **kw)", "g()"),
        ("g(*rest, **kw,)", "g()"),
        ("g(x, *rest, y, **kw)", "g(x, y)"),
        ("g(*rest, **kw, z=1)", "g(z=1)"),
        ("g(h, h, *rest, a=h, **kw)", "g(x + 1, x + 1, a=x + 1)"),
        ("-g(h, *rest, **kw)[h] * h", "-g(x + 1)[x + 1] * (x + 1)"),
        ("g(g(*rest, **kw), *rest)", "g(g())"),
        ("g(*rest, **kw) * h", "g() * (x + 1)"),
    ],
)
def test_captures_of_nothing_go_together(text, result):
    assert put(text, "take({h}, *{rest}, **{kw})", "take(x + 1)") == result


def test_long_argument_lists_get_lines_of_their_own():
    names = [f"a_rather_long_keyword_{n}=value_{n}" for n in range(4)]
    text = put("if 1:\n    return g(x, **kw)", "take(**{kw})", f"take({', '.join(names)})")
    assert text.splitlines()[1] == "    return g(x,"
    assert text.splitlines()[2] == f"        {names[0]},"
    assert all(line == line.rstrip() for line in text.splitlines())
    text = put(
        "if 1:\n    return g(\n        x,\n        **kw,\n    )", "take(**{kw})", f"take({', '.join(names)})"
    )
    assert text.splitlines()[3:] == [*(f"        {name}," for name in names), "    )"]
    text = put("g(*{rest}, **{kw})", "take(*{rest}, **{kw})", f"take({', '.join(names)})", holes=True)
    assert text.splitlines()[1:] == [*(f"    {name}," for name in names[:3]), f"    {names[3]})"]


@pytest.mark.parametrize(
    ("text", "pattern", "code", "what"),
    [
        ("y = kw", "take(**{kw})", "take(b=1)", "is not valid in 'y = kw': it is keyword arguments"),
        ("g(*kw)", "take(**{kw})", "take(b=1)", "is not valid in"),
        ("y = {**kw}", "take(**{kw})", "take(b=1)", "is not valid in"),
        ("y = rest", "take(*{rest})", "take(1)", "it is positional arguments here"),
        ("g(a=1, *rest)", "take(*{rest})", "take(1)", "is not valid in"),
        ("y = f'{h}'", "take({h})", "take(x)", "it is an expression here"),
        ("y = g(h)", "x[{h}]", "x[1:]", "is not valid in"),
        ("g(b=2, **kw)", "take(**{kw})", "take(b=1)", "passes b twice in one call"),
    ],
)
def test_what_cannot_stand_there_is_refused(text, pattern, code, what):
    with pytest.raises(PatchError) as caught:
        put(text, pattern, code)
    assert what in caught.value.what
    assert caught.value.where == "here" and caught.value.target == "C.f" and caught.value.fix
