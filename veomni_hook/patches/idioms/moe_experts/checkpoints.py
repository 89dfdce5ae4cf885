"""Where transformers loads a checkpoint: raise an error for experts left at their random initialisation.

Not kernel code: inserts calls of `veomni_hook.checkpoints.loaded` (see there for the reason) before the
loading code and before the end, where the loading report is complete. A caller that requests this report
(``output_loading_info``) gets it, with the missing experts, instead of the error. If a release has different
code, the site is a miss, which ``veomni-hook explain`` shows, and nothing is checked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.tree import last_name, walk_ast
from veomni_hook.patches.routes.guards import before_statement
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["CANDIDATES", "OP", "find"]

OP = "moe_experts"
CANDIDATES = "nothing is counted: this is where checkpoints are loaded, not experts"

_START, _LOAD, _FINISH = "from_pretrained", "_load_pretrained_model", "_finalize_model_loading"

#: Statements, each with the names that it uses.
Loading = Mapping[ast.stmt, tuple[str, ...]]

_LIST = "output_loading_info"

_CONVERT = "convert_and_load_state_dict_in_model"
_ZERO3 = "_load_state_dict_into_zero3_model"

_CODE = "from veomni_hook.checkpoints.loaded import {0}\n\n{0}({1})"
_COMMENT = "experts that a checkpoint lacks are an error"


def find(view: ModuleView) -> Iterator[Site]:
    """The three methods of transformers' own model class; nothing elsewhere."""
    checks = {
        _START: ("give_list", _asks_for_list),
        _LOAD: ("before_loading", _loading_calls),
        _FINISH: ("after_loading", _reports),
    }
    for owner in view.classes.values() if _LOAD in view.document.source else ():
        methods = view.methods(owner)
        for name, (check, read) in checks.items() if checks.keys() <= methods.keys() else ():
            edits: list[Edit] = []
            # Without additions at the end, the list would contain less than the error that it replaces.
            known = name != _START or _reports(methods[_FINISH])
            for statement, names in read(methods[name]).items() if known else ():
                code = _CODE.format(check, ", ".join(names))
                edits += before_statement(view, methods[name], statement, code, _COMMENT)
            status = Status.ROUTED if edits else Status.MISSED
            reason = "checks the checkpoint's experts" if edits else "the loading code is unknown"
            at, line = f"{owner.name}.{name}", methods[name].lineno
            yield Site(OP, at, status, reason=reason, edits=tuple(edits), counted=False, lineno=line)


def _asks_for_list(function: FunctionNode) -> Loading:
    """The statement that calls ``_load_pretrained_model``, with ``output_loading_info`` if that is bound."""
    known = any(isinstance(n, ast.Name) and n.id == _LIST for n in _targets(function))
    leading = [statement for statement in function.body if _refers(statement, _LOAD)]
    return {leading[0]: (_LIST,)} if known and len(leading) == 1 else {}


def _targets(function: FunctionNode) -> Iterator[ast.expr]:
    for statement in function.body:
        if isinstance(statement, ast.Assign):
            yield from statement.targets


def _refers(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in walk_ast(statement))


def _loading_calls(function: FunctionNode) -> Loading:
    """The statements that load, each with its names for the state dict and the model.

    One calls ``convert_and_load_state_dict_in_model``; another may call the DeepSpeed stage 3 equivalent.
    Empty if a release loads in another way.
    """
    found: dict[ast.stmt, ast.Call] = dict(_assigned_calls(function))
    functions = [last_name(call.func) for call in found.values()]
    given = {node: _handed_over(call) for node, call in found.items()}
    known = functions.count(_CONVERT) == 1 and functions.count(_ZERO3) <= 1
    named = {node: names for node, names in given.items() if names is not None}
    return named if known and len(named) == len(found) else {}


def _assigned_calls(function: FunctionNode) -> Iterator[tuple[ast.Assign, ast.Call]]:
    for node in walk_ast(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if last_name(node.value.func) in (_CONVERT, _ZERO3):
                yield node, node.value


def _handed_over(call: ast.Call) -> tuple[str, str] | None:
    """The names of the state dict and the model; None if either is not a name."""
    given: dict[str | None, ast.expr] = {each.arg: each.value for each in call.keywords}
    given |= dict(zip(("model", "state_dict"), call.args, strict=False))
    state_dict, model = given.get("state_dict"), given.get("model")
    if isinstance(state_dict, ast.Name) and isinstance(model, ast.Name):
        return state_dict.id, model.id
    return None


def _reports(function: FunctionNode) -> Loading:
    """The only return, at the end, with the names of the model and of the returned report."""
    last = function.body[-1]
    names = [argument.arg for argument in function.args.args]
    returns = sum(isinstance(node, ast.Return) for node in walk_ast(function))
    if not (isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and returns == 1):
        return {}
    return {last: ("model", last.value.id)} if {"model", last.value.id} <= {*names} else {}
