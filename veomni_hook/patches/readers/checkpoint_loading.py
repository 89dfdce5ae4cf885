"""Find where transformers' model class loads a checkpoint, and what it loads."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from veomni_hook.patches.text.document import FunctionNode
from veomni_hook.patches.text.walk import walk_ast

__all__ = ["FINISH", "LOAD", "START", "asks_for_list", "loading_calls", "reports"]

START, LOAD, FINISH = "from_pretrained", "_load_pretrained_model", "_finalize_model_loading"

#: Statements, each with the names that it uses.
Loading = Mapping[ast.stmt, tuple[str, ...]]

_LIST = "output_loading_info"

_CONVERT = "convert_and_load_state_dict_in_model"
_ZERO3 = "_load_state_dict_into_zero3_model"


def asks_for_list(function: FunctionNode) -> Loading:
    """The statement of `START` that calls `LOAD`, with the name ``output_loading_info`` if it is bound."""
    known = any(isinstance(n, ast.Name) and n.id == _LIST for n in _targets(function))
    leading = [statement for statement in function.body if _refers(statement, LOAD)]
    return {leading[0]: (_LIST,)} if known and len(leading) == 1 else {}


def _targets(function: FunctionNode) -> Iterator[ast.expr]:
    for statement in function.body:
        if isinstance(statement, ast.Assign):
            yield from statement.targets


def _refers(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in walk_ast(statement))


def loading_calls(function: FunctionNode) -> Loading:
    """The statements of `LOAD` that load, each with its names for the state dict and the model.

    One calls ``convert_and_load_state_dict_in_model``; another may call the DeepSpeed stage 3 equivalent.
    Empty if a release loads in another way.
    """
    found: dict[ast.stmt, ast.Call] = dict(_assigned_calls(function))
    functions = [ast.unparse(call.func) for call in found.values()]
    given = {node: _handed_over(call) for node, call in found.items()}
    known = functions.count(_CONVERT) == 1 and functions.count(_ZERO3) <= 1
    named = {node: names for node, names in given.items() if names is not None}
    return named if known and len(named) == len(found) else {}


def _assigned_calls(function: FunctionNode) -> Iterator[tuple[ast.Assign, ast.Call]]:
    for node in walk_ast(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if ast.unparse(node.value.func) in (_CONVERT, _ZERO3):
                yield node, node.value


def _handed_over(call: ast.Call) -> tuple[str, str] | None:
    """The names of the state dict and the model; None if either is not a name."""
    given: dict[str | None, ast.expr] = {each.arg: each.value for each in call.keywords}
    given |= dict(zip(("model", "state_dict"), call.args, strict=False))
    state_dict, model = given.get("state_dict"), given.get("model")
    if isinstance(state_dict, ast.Name) and isinstance(model, ast.Name):
        return state_dict.id, model.id
    return None


def reports(function: FunctionNode) -> Loading:
    """The only return of `FINISH`, at its end, with the names of the model and of the returned report."""
    last = function.body[-1]
    names = [argument.arg for argument in function.args.args]
    returns = sum(isinstance(node, ast.Return) for node in walk_ast(function))
    if not (isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and returns == 1):
        return {}
    return {last: ("model", last.value.id)} if {"model", last.value.id} <= {*names} else {}
