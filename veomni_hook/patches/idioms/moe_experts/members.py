"""What ``__init__`` of an experts class creates: stacked parameters, numbered modules, an identity."""

from __future__ import annotations

import ast
import re

from veomni_hook.patches.code.statements import initialised, statements_of_init
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["is_identity", "is_numbered", "parameter_shapes"]

_PARAMETER = re.compile(r"(torch\.)?nn\.Parameter\(torch\.\w+\(.+\)\)", re.DOTALL)
_NUMBERED = re.compile(r"for (\w+) in range\([\w.]+\):\n    self\[f'\w*\{\1\}'\]")


def parameter_shapes(owner: ast.ClassDef) -> dict[str, list[str]]:
    """The parameters that ``__init__`` creates, with their dimensions as source text.

    A dimension that ``__init__`` also stores has the attribute's name: ``self.num_experts``.
    """
    shapes: dict[str, list[str]] = {}
    kept: dict[str, str] = {}
    for name, value in initialised(owner):
        if _PARAMETER.fullmatch(ast.unparse(value)) is None:
            kept[ast.unparse(value)] = f"self.{name}"
        elif isinstance(value, ast.Call) and isinstance(made_of := value.args[0], ast.Call):
            sizes = made_of.args
            if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
                sizes = sizes[0].elts
            if sizes:
                shapes[name] = [ast.unparse(size) for size in sizes]
    return {name: [kept.get(size, size) for size in shape] for name, shape in shapes.items()}


def is_numbered(view: ModuleView, owner: ast.ClassDef) -> bool:
    """Whether ``__init__`` fills a ``ModuleDict`` only with numbered modules, in order."""
    nodes = list(statements_of_init(owner))
    loops = [node for node in nodes if isinstance(node, ast.For)]
    stored = [node for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    assigned = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)]
    others = [node for node in assigned if node.targets != stored]
    return (
        [view.scope.dotted(base) for base in owner.bases] == ["torch.nn.ModuleDict"]
        and len(loops) == len(stored) == 1
        and not others
        and _NUMBERED.match(ast.unparse(loops[0])) is not None
    )


def is_identity(view: ModuleView, owner: ast.ClassDef, attribute: str) -> bool:
    """Whether ``__init__`` sets ``self.x``, and only to an ``nn.Identity``."""
    made = [
        view.scope.dotted(value.func)
        for name, value in initialised(owner)
        if isinstance(value, ast.Call) and f"self.{name}" == attribute
    ]
    return made == ["torch.nn.Identity"]
