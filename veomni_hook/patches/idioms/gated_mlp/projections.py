"""Calls of the projections to gate and up by the slot, where their width may be no multiple of 8.

kernel(self.gate_proj(x), self.up_proj(x), self.act_fn)
  -> kernel(*slot.projected(self.gate_proj, self.up_proj, x), self.act_fn)
"""

from __future__ import annotations

import ast

from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["in_tower", "project_together"]

_BOUNDARIES = "cu_seqlens"
BOTH = Template("KERNEL(HOME.GATE(X), OTHER.UP(X), *OPERANDS, **OTHERS)", names="HOME OTHER X")


def in_tower(view: ModuleView, owner: ast.ClassDef) -> bool:
    """Whether ``owner`` is created by a class whose ``forward`` gets the boundaries of segments."""
    return any(
        any(_BOUNDARIES in name for name in parameter_names(forward)) and f"{owner.name}(" in view.text(maker)
        for maker, forward in view.forwards()
        if maker is not owner
    )


def project_together(call: ast.Call, slot: str) -> None:
    """Let ``slot`` call the projections if they are the call's first operands and take the same name.

    Mutates ``call``.
    """
    if (both := BOTH.match(call)) is not None:
        modules = f"{both['HOME']}.{both['GATE']}, {both['OTHER']}.{both['UP']}"
        together = ast.parse(f"{slot}.projected({modules}, {both['X']})", mode="eval").body
        call.args[:2] = [ast.Starred(together, ast.Load())]
