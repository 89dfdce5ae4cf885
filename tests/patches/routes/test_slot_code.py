"""The text of guards."""

import ast

import pytest

from veomni_hook.patches.routes.guards import ask, parameters_as, tuple_of


def function(text):
    (node,) = ast.parse(text).body
    return node


def run(code, **names):
    body = "\n".join(f"    {line}" for line in code.splitlines())
    made: dict = dict(names)
    exec(f"def f():\n{body}\n    return 'upstream'", made)
    return made["f"]()


class Slot:
    def __init__(self, kernel) -> None:
        self.asked = []
        self.run = kernel

    def kernel(self, *operands):
        self.asked.append(operands)
        return self.run


def test_the_kernel_is_called_with_what_the_slot_was_asked_with():
    slot = Slot(lambda a, b: a + b)
    code = ask(function("def f(): pass"), "slot", "this", ["a", "b"])
    assert run(code, slot=slot, this="module", a=1, b=2) == 3
    assert slot.asked == [("module", 1, 2)]


@pytest.mark.parametrize(("tests", "asked"), [(["on"], 1), (["on", "off or on"], 1), (["on", "off"], 0)])
def test_every_test_has_to_hold(tests, asked):
    slot = Slot(len)
    run(ask(function("def f(): pass"), "slot", "0", ["a"], tests), slot=slot, a="", on=True, off=False)
    assert len(slot.asked) == asked


def test_a_long_tuple_has_a_line_each():
    assert tuple_of(["a"]) == "(a,)"
    assert tuple_of(["a", "b"]) == "(a, b)"
    long = ["a" * 50, "b" * 50]
    assert ast.literal_eval(tuple_of([repr(text) for text in long])) == tuple(long)
    assert tuple_of(long).count("\n") == 3


@pytest.mark.parametrize(
    ("signature", "operands", "fixed", "expected"),
    [
        # Names, defaults and kinds are kept.
        ("q, k", {"q": "q", "k": "k"}, {}, "q, k"),
        ("query, k, dim=1", {"query": "q", "k": "k"}, {}, "query->q, k, dim=1"),
        ("q, /, *, k=None", {"q": "q", "k": "k"}, {}, "q, /, *, k=None"),
        ("q, *rest, k, **more", {"q": "q", "k": "k"}, {}, "q, *rest, k, **more"),
        # A fixed operand is a keyword with its value.
        ("q", {"q": "q"}, {"unsqueeze_dim": 2}, "q, *, unsqueeze_dim=2"),
        ("q, *, k", {"q": "q", "k": "k"}, {"dim": "x"}, "q, *, k, dim='x'"),
        # The default is not known here; k is missing; another parameter has the name q, or that of a fixed operand.
        ("q, scale=SCALE", {"q": "q"}, {}, None),
        ("q", {"q": "q", "k": "k"}, {}, None),
        ("states, q", {"states": "q"}, {}, None),
        ("q, dim=1", {"q": "q"}, {"dim": 2}, None),
    ],
)
def test_what_says_the_operands(signature, operands, fixed, expected):
    assert parameters_as(function(f"def f({signature}): pass"), operands, fixed) == expected
