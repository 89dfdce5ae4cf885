"""Source code for nodes."""

import pytest

from tests.patches.graph.code import forward, method_form
from veomni_hook.patches.graph import source


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("self.a.b", "self.a.b"),
        ("ACT2FN[self.kind]", "ACT2FN[self.kind]"),
        ("h.device", "h.device"),
        ("self.w.to(h.device)", "self.w.to(h.device)"),
        ("h is None", "h is None"),
        ("not (h is None or self.a)", "not (h is None or self.a)".replace("h is None or", "(h is None) or")),
        ("'text'", "'text'"),
        ("h.cfg", "h.cfg"),
        ("F.silu", "F.silu"),
    ],
)
def test_code_for_the_start_of_a_function(expression, text):
    assert source(forward(f"return {expression}").result) == text


def test_the_receiver_keeps_its_name():
    found = method_form("class M:\n    def forward(this, x):\n        return this.w\n")
    assert source(found.result, found.receiver) == "this.w"


@pytest.mark.parametrize("expression", ["h + 1", "self.f(h)", "h.float()", "h.shape[0]", "(lambda: 1)"])
def test_no_code_for_what_is_computed(expression):
    with pytest.raises(ValueError, match="not code"):
        source(forward(f"return {expression}").result)
