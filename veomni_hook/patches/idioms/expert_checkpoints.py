"""Where transformers loads a checkpoint: experts left at their random initialisation become an error.

Not a kernel's code: calls of `veomni_hook.checkpoints.loaded`, which says what for, go into the model class
that defines ``_load_pretrained_model`` and ``_finalize_model_loading``,

* in front of the statements that call ``convert_and_load_state_dict_in_model(model=…, state_dict=…)`` and
  ``_load_state_dict_into_zero3_model(…)``;
* in front of the ``return`` of the loading report, its last statement.

Where a release is built differently the site is a miss, which ``veomni-hook explain`` shows, and nothing is
checked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.routes.site import Site, Splice, Status
from veomni_hook.patches.routes.splice import before_statement
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.text.document import FunctionNode
from veomni_hook.patches.text.walk import walk_ast

__all__ = ["CANDIDATES", "OP", "find"]

OP = "moe_experts"
CANDIDATES = "nothing is counted: this is where checkpoints are loaded, not experts"

_LOAD, _FINISH = "_load_pretrained_model", "_finalize_model_loading"
_CONVERT = "convert_and_load_state_dict_in_model"
_ZERO3 = "_load_state_dict_into_zero3_model"
_MODULE = "veomni_hook.checkpoints.loaded"
_COMMENT = "experts that a checkpoint lacks are an error"


def find(view: ModuleView) -> Iterator[Site]:
    """The two methods of transformers' own model class; nothing elsewhere."""
    if _LOAD not in view.document.source:
        return
    for owner in view.classes.values():
        methods = view.methods(owner)
        if (load := methods.get(_LOAD)) is not None:
            yield _site(f"{owner.name}.{_LOAD}", load, _before_loading(view, load))
            if (finish := methods.get(_FINISH)) is not None:
                yield _site(f"{owner.name}.{_FINISH}", finish, _after_loading(view, finish))


def _site(target: str, function: FunctionNode, splices: tuple[Splice, ...]) -> Site:
    return Site(
        op=OP,
        target=target,
        status=Status.ROUTED if splices else Status.MISSED,
        reason="checks the checkpoint's experts" if splices else "loads in a way that is not known here",
        splices=splices,
        counted=False,
        lineno=function.lineno,
    )


def _before_loading(view: ModuleView, function: FunctionNode) -> tuple[Splice, ...]:
    """Check the names of what is handed to the calls that load; DeepSpeed's stage 3 has one of its own."""
    splices: list[Splice] = []
    seen: list[str] = []
    for node in walk_ast(function):
        if isinstance(node, ast.Assign) and (call := _loading(node.value)) is not None:
            loads, arguments = call
            seen.append(loads)
            splices += before_statement(view, function, node, _code("check_names", arguments), _COMMENT)
    return tuple(splices) if seen.count(_CONVERT) == 1 and len({*seen}) == len(seen) else ()


def _loading(value: ast.expr) -> tuple[str, str] | None:
    """Which of the two loads here and what `check_names` is called with before it; None for other calls."""
    if not isinstance(value, ast.Call) or (loads := ast.unparse(value.func)) not in (_CONVERT, _ZERO3):
        return None
    given = {each.arg: each.value for each in value.keywords}
    given |= dict(zip(("model", "state_dict"), value.args, strict=False))
    named = [given.get(key) for key in ("state_dict", "model")]
    names = [each.id for each in named if isinstance(each, ast.Name)]
    return (loads, ", ".join(names)) if len(names) == len(named) else None


def _after_loading(view: ModuleView, function: FunctionNode) -> tuple[Splice, ...]:
    """Check the report that the method returns at its end."""
    last = function.body[-1]
    names = [argument.arg for argument in function.args.args]
    returns = sum(isinstance(node, ast.Return) for node in walk_ast(function))
    if not (isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and returns == 1):
        return ()
    if "model" not in names or last.value.id not in names:
        return ()
    return before_statement(view, function, last, _code("check_loaded", f"model, {last.value.id}"), _COMMENT)


def _code(name: str, arguments: str) -> str:
    return f"from {_MODULE} import {name}\n\n{name}({arguments})"
