"""Calls of the projections to gate and up by the slot, where their width may be no multiple of 8.

kernel(self.gate_proj(x), self.up_proj(x), self.act_fn)
  -> kernel(*slot.projected(self.gate_proj, self.up_proj, x), self.act_fn)
"""

from __future__ import annotations

import ast
from typing import TypeGuard

from veomni_hook.patches.routes.view import ModuleView

__all__ = ["in_tower", "project_together"]

_BOUNDARIES = "cu_seqlens"


def in_tower(view: ModuleView, owner: ast.ClassDef) -> bool:
    """Whether ``owner`` is created by a class whose ``forward`` gets the boundaries of segments."""
    return any(
        any(_BOUNDARIES in each.arg for each in (*forward.args.args, *forward.args.kwonlyargs))
        and f"{owner.name}(" in view.text(maker)
        for maker, forward in view.forwards()
        if maker is not owner
    )


def project_together(call: ast.Call, slot: str) -> None:
    """Let ``slot`` call the projections if they are the call's first operands and take the same name.

    Mutates ``call``.
    """
    if len(call.args) < 2:
        return
    gate, up = call.args[:2]
    if not (_is_projection(gate) and _is_projection(up)) or ast.dump(gate.args[0]) != ast.dump(up.args[0]):
        return
    both = ast.Call(
        ast.Attribute(ast.Name(slot, ast.Load()), "projected", ast.Load()),
        [gate.func, up.func, gate.args[0]],
        [],
    )
    call.args[:2] = [ast.Starred(both, ast.Load())]


def _is_projection(node: ast.expr) -> TypeGuard[ast.Call]:
    """Whether it calls an attribute of a name with a name."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Name)
        and not node.keywords
    )
