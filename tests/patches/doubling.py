"""Two idioms for tests: `double` guards forwards that multiply by 2, `turn` replaces calls of `turn`."""

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.scope import free_name
from veomni_hook.patches.routes.guards import before_body, in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status, slot_name
from veomni_hook.patches.spec import SlotSpec

DOUBLE = SlotSpec(slot_name("double", "times_two"), "double", "times_two")
TURN = SlotSpec(slot_name("turn", "half"), "turn", "half", parameters="x, angle=1")

UPSTREAM = """\
def rotate(x):
    return -x

def turn(x, angle=1):
    return rotate(x) * angle

class Double(object):
    def forward(self, x):
        return x * 2

    def other(self, x):
        return x

class Triple(object):
    def forward(self, x):
        return x * 3

class Attention(object):
    def forward(self, x):
        before = x + 1
        y = turn(before)
        return y + 10

class Plain(object):
    def forward(self, x):
        return x
"""


def double(view: ModuleView) -> Iterator[Site]:
    """Forwards that return a product; products with anything but 2 are missed."""
    for owner, forward in view.forwards():
        last = forward.body[-1]
        if not (isinstance(last, ast.Return) and isinstance(last.value, ast.BinOp)):
            continue
        if not isinstance(last.value.op, ast.Mult):
            continue
        target = f"{owner.name}.forward"
        if view.text(last.value.right) != "2":
            reason = f"times_two: expected 2, found {view.text(last.value.right)}"
            yield Site("double", target, Status.MISSED, reason=reason)
            continue
        name = free_name(forward, "kernel")
        code = f"if ({name} := {DOUBLE.name}.kernel(self, x)) is not None:\n    return {name}(x)\n"
        yield Site(
            "double",
            target,
            Status.ROUTED,
            "times_two",
            captures={"factor": "2"},
            edits=before_body(view, forward, code, "double/times_two"),
            slots=(DOUBLE,),
        )


def turn(view: ModuleView) -> Iterator[Site]:
    """Calls of `turn` in forwards."""
    for owner, forward in view.forwards():
        for node in ast.walk(forward):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "turn":
                edit = in_place(view, node.func, f"{TURN.name}.at(self, turn)")
                target = f"{owner.name}.forward"
                yield Site("turn", target, Status.ROUTED, "half", edits=(edit,), slots=(TURN,), counted=False)
