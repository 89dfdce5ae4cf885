"""Linear layers with low-rank adapters, as PEFT's LoRA has them.

A forward calls the layer that the module holds, and then, in a loop over the names of active adapters, adds
``up(down(dropout(x))) * scale``, each taken by name from a dictionary of the module:

    result = self.base(x, *args, **kwargs)
    for name in self.active:
        if name not in self.down: continue
        ...
        if name not in self.variants:
            result = result + up(down(dropout(x))) * scale
        else: ...

The guard is in front of the first of these statements, and passes what the loop would look up. Every other
statement between the call and the ``return`` must be one that the reader knows; else the place is a miss, and
nothing is changed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.template import Found
from veomni_hook.patches.idioms.low_rank_linear.read import is_candidate, read
from veomni_hook.patches.routes.insertion import before_statement
from veomni_hook.patches.routes.slot_code import ask
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Missed, Site, Status
from veomni_hook.patches.slots import formula_slot

__all__ = ["CANDIDATES", "OP", "find"]

OP = "low_rank_linear"
CANDIDATES = (
    "every forward with a loop that multiplies up(down(dropout(x))) by a scale, all of which it looks up "
    "in dictionaries of the module"
)

_VARIANT = "product_added"


def find(view: ModuleView) -> Iterator[Site]:
    """Every forward with such a loop, also in classes that are defined under a condition."""
    for owner in _classes(view.document.tree.body):
        forward = next((one for one in owner.body if _is_forward(one)), None)
        if not isinstance(forward, ast.FunctionDef) or not is_candidate(forward):
            continue
        site = Site(OP, f"{owner.name}.forward", Status.MISSED, lineno=forward.lineno)
        try:
            yield _routed(view, forward, read(forward), site)
        except Missed as missed:
            yield replace(site, reason=str(missed))


def _routed(view: ModuleView, forward: FunctionNode, found: Found, site: Site) -> Site:
    name, slot = found["NAME"], formula_slot(OP, _VARIANT)
    looked_up = ", ".join(f"self.{found[held]}[{name}]" for held in ("DROPOUTS", "DOWNS", "UPS", "SCALES"))
    adapters = (
        f"[\n    ({looked_up}, self.{found['VARIANTS']}.get({name}))\n"
        f"    for {name} in self.{found['ACTIVE']}\n    if {name} in self.{found['DOWNS']}\n]"
    )
    operands = [found["X"], f"self.{found['BASE']}", adapters.replace("\n", "\n    ")]
    others = [found[rest].lstrip("*") for rest in ("ARGS", "KWARGS") if found[rest]]
    tests = [f"not ({' or '.join(others)})"] if others else []
    code = ask(forward, slot.name, "self", operands, tests)
    edits = before_statement(view, forward, found.first, code, f"{OP}/{_VARIANT}")
    return replace(site, status=Status.ROUTED, variant=_VARIANT, edits=edits, slots=(slot,))


def _classes(body: list[ast.stmt]) -> Iterator[ast.ClassDef]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node
        elif isinstance(node, ast.If):
            yield from _classes([*node.body, *node.orelse])


def _is_forward(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "forward"
