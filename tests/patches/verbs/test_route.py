from collections.abc import Iterator
from typing import Any

import pytest

from tests.patches import doubling
from veomni_hook.errors import IdiomError
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.render import unified_diff
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

UPSTREAM = doubling.UPSTREAM


class Slot:
    """A slot whose kernel returns its name; it refuses negative operands."""

    def __init__(self, op: str, variant: str, module: str, parameters: str = "") -> None:
        self.name = f"{op}/{variant}"
        self.parameters = parameters

    def kernel(self, owner: Any, x: Any) -> Any:
        return None if x < 0 else lambda x: (self.name, x)

    def at(self, owner: Any, upstream: Any) -> Any:
        return lambda x: upstream(x) if x < 0 else 1000


@pytest.fixture(autouse=True)
def slots(monkeypatch):
    monkeypatch.setattr("veomni_hook.kernels.slot.Slot", Slot)


def routed(target, *edits, op="op"):
    def find(view: ModuleView) -> Iterator[Site]:
        yield Site(op, target, Status.ROUTED, "formula", edits=edits)

    return find


def test_routes_ask_their_slots_and_fall_through(patched, run, idioms):
    idioms(doubling.double, doubling.turn)
    module = run(patched(UPSTREAM, idioms=True))
    assert module["Double"]().forward(4) == ("double/times_two", 4)
    assert module["Double"]().forward(-4) == -8
    assert module["Attention"]().forward(4) == 1010
    assert module["Attention"]().forward(-4) == 13
    assert module["Triple"]().forward(4) == 12
    assert module["veomni_turn_half"].parameters == "x, angle=1"
    assert module["veomni_double_times_two"].parameters == ""


def test_the_text_around_routes_stays(patched, idioms):
    idioms(doubling.double, doubling.turn)
    result = patched(UPSTREAM, idioms=True)
    changed = [line for line in result.plain.splitlines() if line not in UPSTREAM.splitlines()]
    assert changed == [
        "from veomni_hook.kernels.slot import Slot as VeomniSlot",
        'veomni_double_times_two = VeomniSlot("double", "times_two", __name__)',
        'veomni_turn_half = VeomniSlot("turn", "half", __name__, parameters="x, angle=1")',
        "        if (kernel := veomni_double_times_two.kernel(self, x)) is not None:",
        "            return kernel(x)",
        "        y = veomni_turn_half.at(self, turn)(before)",
    ]
    assert result.report.untouched == ("rotate", "turn", "Triple", "Plain")
    markers = [line.strip() for line in result.text.splitlines() if line not in result.plain.splitlines()]
    assert "# [ROUTED] double/times_two" in markers and "# [MODIFIED CLASS] Double: forward" in markers
    text = result.text.splitlines()
    call = next(number for number, line in enumerate(text) if "turn_half.at(" in line)
    assert text[call - 1] == "        # [ROUTED] turn/half"
    assert "[ROUTED]" not in unified_diff(UPSTREAM, result, "pkg.upstream")


def test_the_report_names_op_formula_and_captures(patched, idioms):
    idioms(doubling.double, doubling.turn)
    report = patched(UPSTREAM, idioms=True).report
    routes = [one for one in report.applied if one.kind == "route"]
    assert [(one.target, one.op, one.variant, one.reason) for one in routes] == [
        ("Double.forward", "double", "times_two", "double/times_two: factor=2"),
        ("Attention.forward", "turn", "half", "turn/half"),
    ]
    assert {one.config for one in routes} == {"veomni_hook.patches.idioms"}
    assert [slot.name for slot in report.slots] == ["veomni_double_times_two", "veomni_turn_half"]
    (missed,) = report.missed
    assert (missed.op, missed.target, missed.status) == ("double", "Triple.forward", "missed")
    assert "expected 2, found 3" in missed.reason


def put(patched, idioms, edit, upstream=UPSTREAM, at="x * 2"):
    """Patch with one route, which puts text in front of ``at`` in a method."""
    start = upstream.index(at)
    idioms(routed("Double.forward", Edit(start, start + edit[0], edit[1])))
    return patched(upstream, idioms=True)


def test_overlapping_routes_name_both_idioms(patched, idioms):
    start = UPSTREAM.index("x * 2")
    here = Edit(start, start + 5, "x")
    idioms(routed("Double.forward", here, op="one"), routed("Double.forward", here, op="other"))
    with pytest.raises(IdiomError, match=r"route one/formula .* route other/formula .* same code"):
        patched(UPSTREAM, idioms=True)


def test_a_route_cannot_write_outside_of_its_definition(patched, idioms):
    with pytest.raises(IdiomError, match=r"op/formula of Double\.forward writes outside") as caught:
        put(patched, idioms, (5, "x"), at="x * 3")
    assert "pkg.upstream" in caught.value.where


def test_a_route_cannot_bind_what_the_function_uses(patched, run, idioms):
    upstream = UPSTREAM.replace("return x * 2", "return x * 2 if kernel else 0").replace("x * 3", "x * 2")
    start = upstream.index("        return x * 2 if")
    guard = Edit(start, start, "        if (kernel := 0): return 1\n")
    idioms(routed("Double.forward", guard))
    with pytest.raises(IdiomError, match=r"binds names that the function uses itself: kernel"):
        patched(upstream, idioms=True)
    idioms(doubling.double)
    upstream = UPSTREAM.replace("def forward(self, x):\n        return x * 2", TAKEN)
    assert "veomni_kernel := " in patched(upstream, idioms=True).text
    module = run(patched(upstream, idioms=True))["Double"]()
    assert (module.forward(1), module.forward(-1)) == (("double/times_two", 1), -2)


GUARD = "if x:\n            kernel = 2\n            return 1"


@pytest.mark.parametrize(
    ("body", "at", "edit", "taken"),
    [
        ("kernel = x\n        y = 1\n        return kernel", "        y = 1", "if (kernel := 0): return 1", True),
        ("kernel = x\n        y = 1\n        return kernel", "        y = 1", GUARD, False),
        ("y = 1\n        return x", "        y = 1", GUARD, False),
        ("return kernel(x * 2)", "x * 2", "(kernel := x)", True),
        ("return self.kernel(x * 2)", "x * 2", "(kernel := x)", False),
        ("return kernel(x * 2)", "x * 2", "slot.kernel(x)", False),
        ("return kernel(x * 2)", "x * 2", "sum(kernel for kernel in x)", False),
        ("return kernel(x * 2)", "x * 2", "slot(lambda kernel: kernel)", False),
    ],
)  # fmt: skip
def test_which_bindings_disturb_upstream(patched, idioms, body, at, edit, taken):
    upstream = UPSTREAM.replace("return x * 2", body)
    change = (5, edit) if at == "x * 2" else (0, f"        {edit}\n")
    if not taken:
        assert edit in put(patched, idioms, change, upstream, at).text
        return
    with pytest.raises(IdiomError, match=r"binds names that the function uses itself: kernel"):
        put(patched, idioms, change, upstream, at)


def test_a_route_may_end_its_definition_and_stand_above_it(patched, run, idioms):
    upstream = "if 1:\n    class A(object):\n        def forward(self, x):\n            x += 1\nB = 1\n"
    above, below = upstream.index("    class"), upstream.index("B = 1")
    idioms(
        routed(
            "A.forward",
            Edit(above, above, "    @setattr_made\n"),
            Edit(below, below, "            return x\n"),
        )
    )
    code = "@config.add_helper\ndef setattr_made(cls):\n    cls.made = 1\n    return cls\n"
    module = run(patched(upstream, code, idioms=True))["A"]
    assert module.made == 1 and module().forward(1) == 2


def test_what_a_user_binds_in_the_same_function_is_his(patched, run, idioms):
    idioms(doubling.turn)
    code = """
        config.rewrite(
            'Attention.forward', pattern='return {y} + 10', replacement='before = 20\\nreturn {y} + before'
        )
    """
    assert run(patched(UPSTREAM, code, idioms=True))["Attention"]().forward(1) == 1020


def test_a_route_may_stand_in_what_another_relies_on(patched, run, idioms):
    start = UPSTREAM.index("rotate(x) * angle")
    idioms(doubling.turn, routed("turn", Edit(start, start + 9, "rotate(-x)"), op="inner"))
    result = patched(UPSTREAM, idioms=True)
    assert {one.op for one in result.report.applied if one.kind == "route"} == {"turn", "inner"}
    assert run(result)["turn"](3) == 3


TAKEN = """def forward(self, x):
        kernel = x
        if kernel is None: return 0
        return x * 2"""


def test_code_of_a_route_that_is_no_python_is_named(patched, idioms):
    with pytest.raises(Exception, match="not valid Python") as caught:
        put(patched, idioms, (0, "if ("))
    assert "Double.forward" in str(caught.value)


def test_the_name_of_a_slot_must_be_free(patched, idioms):
    idioms(doubling.double)
    with pytest.raises(IdiomError, match="has the name of something that the module defines"):
        patched(UPSTREAM + "\n\nveomni_double_times_two = 1\n", idioms=True)
