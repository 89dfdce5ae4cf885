from __future__ import annotations

import ast
import textwrap

import pytest

from veomni_hook.patches.idioms.load_balancing_loss import Case

FACTS = {"x is None": False, "isinstance(x, tuple)": True}


def left(text: str) -> str:
    made = Case(FACTS).block(ast.parse(textwrap.dedent(text)).body)
    return "\n".join(ast.unparse(ast.fix_missing_locations(each)) for each in made)


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("x is None", False),
        ("x is not None", True),
        ("not x is None", True),
        ("x is None or not isinstance(x, tuple)", False),
        ("x is not None and isinstance(x, tuple)", True),
        ("y and x is None", False),
        ("y or x is not None", True),
    ],
)
def test_decided_tests_are_gone(test, outcome):
    assert left(f"if {test}:\n    a = 1\nelse:\n    a = 2") == ("a = 1" if outcome else "a = 2")


@pytest.mark.parametrize(
    "test", ["y", "y is None", "y and x is not None", "y or x is None", "isinstance(y, tuple)"]
)
def test_other_tests_stay(test):
    assert left(f"if {test}:\n    a = 1") == f"if {test}:\n    a = 1"


def test_inside_of_blocks():
    assert (
        left("for i in y:\n    if x is None:\n        a = 1\n    else:\n        a = i")
        == "for i in y:\n    a = i"
    )


def test_lists_become_loops():
    code = left("a = f([g(i) for i in y], 2)")
    assert code == (
        "veomni_list_1 = ()\nfor i in y:\n    veomni_list_1 = veomni_list_1 + (g(i),)\na = f(veomni_list_1, 2)"
    )


@pytest.mark.parametrize("text", ["a = [i for i in y if i]", "a = [i for j in y for i in j]"])
def test_other_comprehensions_stay(text):
    assert left(text) == text


def test_additions_to_a_new_tensor():
    assert left("a = torch.zeros(3).scatter_add_(0, i, x)") == "a = torch.zeros(3).scatter_add(0, i, x)"
    assert left("a = b.scatter_add_(0, i, x)") == "a = b.scatter_add_(0, i, x)"
