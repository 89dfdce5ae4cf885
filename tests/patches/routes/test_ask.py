"""The text of guards."""

from __future__ import annotations

import ast

import pytest

from veomni_hook.patches.routes.ask import ask, tuple_of


def function(text: str) -> ast.FunctionDef:
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef)
    return node


def run(code: str, **names: object) -> object:
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


def test_the_kernel_is_called_with_what_the_slot_was_asked_with() -> None:
    slot = Slot(lambda a, b: a + b)
    code = ask(function("def f(): pass"), "slot", "this", ["a", "b"])
    assert run(code, slot=slot, this="module", a=1, b=2) == 3
    assert slot.asked == [("module", 1, 2)]


def test_upstream_runs_where_there_is_no_kernel() -> None:
    code = ask(function("def f(): pass"), "slot", "this", ["a"])
    assert run(code, slot=Slot(None), this=0, a=1) == "upstream"


@pytest.mark.parametrize(
    ("tests", "asked"), [(["on"], 1), (["off"], 0), (["on", "off or on"], 1), (["on", "off"], 0)]
)
def test_every_test_has_to_hold(tests, asked) -> None:
    slot = Slot(len)
    run(ask(function("def f(): pass"), "slot", "0", ["a"], tests), slot=slot, a="", on=True, off=False)
    assert len(slot.asked) == asked


def test_nothing_is_looked_up_where_a_test_fails() -> None:
    code = ask(function("def f(): pass"), "slot", "0", ["missing"], ["off"])
    assert run(code, slot=Slot(len), off=False) == "upstream"


def test_names_of_the_function_are_left_alone() -> None:
    code = ask(function("def f(kernel, operands): return kernel"), "slot", "self", ["kernel"])
    assert "veomni_kernel := " in code
    assert code.startswith("veomni_operands = (kernel,)")


def test_a_long_tuple_has_a_line_each() -> None:
    assert tuple_of(["a"]) == "(a,)"
    assert tuple_of(["a", "b"]) == "(a, b)"
    long = ["a" * 50, "b" * 50]
    assert ast.literal_eval(tuple_of([repr(text) for text in long])) == tuple(long)
    assert tuple_of(long).count("\n") == 3
