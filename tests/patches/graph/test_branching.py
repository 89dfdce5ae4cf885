"""The formulas of a function with tests."""

from tests.patches.graph.code import forward
from veomni_hook.patches.graph import branches, source


def test_branches_are_formulas_with_tests():
    text = "y = h.float()\n        if self.scaled:\n            y = y * self.w\n        return y.to(h.dtype)"
    scaled, plain = branches(forward(text))
    assert [(source(test), outcome) for test, outcome in scaled.tests] == [("self.scaled", True)]
    assert scaled.node == forward("return (h.float() * self.w).to(h.dtype)").result
    assert plain.node == forward("return h.float().to(h.dtype)").result


def test_many_tests_are_not_taken_apart():
    body = (
        "\n        ".join(f"h = h + {n} if self.t{n} else h * {n + 2}" for n in range(8))
        + "\n        return h"
    )
    assert len(branches(forward(body))) == 1
