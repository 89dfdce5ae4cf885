"""What ``__init__`` of an experts class creates: stacked parameters, numbered modules, an identity."""

from __future__ import annotations

import ast

from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import initialised, statements_of_init
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["is_identity", "is_numbered", "parameter_shapes"]

PARAMETERS = [Template(f"{home}nn.Parameter(torch.MADE(*SIZES, **OPTIONS))") for home in ("", "torch.")]
NUMBERED = Template("for I in range(COUNT):\n    self[KEY] = MODULE\n    ...")


def parameter_shapes(owner: ast.ClassDef) -> dict[str, list[str]]:
    """The parameters that ``__init__`` creates, with their dimensions as source text.

    A dimension that ``__init__`` also stores has the attribute's name: ``self.num_experts``.
    """
    shapes: dict[str, list[str]] = {}
    kept: dict[str, str] = {}
    for name, value in initialised(owner):
        made = next(filter(None, (form.match(value) for form in PARAMETERS)), None)
        if made is None:
            kept[ast.unparse(value)] = f"self.{name}"
            continue
        sizes = made.bound["SIZES"].nodes
        if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple | ast.List):
            sizes = tuple(sizes[0].elts)
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
        and _is_counted(loops[0])
    )


def _is_counted(loop: ast.For) -> bool:
    """Whether a loop stores a module under a name that ends with its number: ``self[f"expert_{i}"]``."""
    counted = NUMBERED.match(loop)
    match counted and counted.expression("KEY"):
        case ast.JoinedStr(values=[*words, ast.FormattedValue(value=ast.Name(number))]):
            assert counted is not None  # noqa: S101
            return number == counted["I"] and all(isinstance(word, ast.Constant) for word in words)
    return False


def is_identity(view: ModuleView, owner: ast.ClassDef, attribute: str) -> bool:
    """Whether ``__init__`` sets ``self.x``, and only to an ``nn.Identity``."""
    made = [
        view.scope.dotted(value.func)
        for name, value in initialised(owner)
        if isinstance(value, ast.Call) and f"self.{name}" == attribute
    ]
    return made == ["torch.nn.Identity"]
