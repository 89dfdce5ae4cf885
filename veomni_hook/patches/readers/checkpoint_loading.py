"""Where a model class of transformers loads a checkpoint, and what it loads."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from veomni_hook.patches.text.document import FunctionNode
from veomni_hook.patches.text.walk import walk_ast

__all__ = ["FINISH", "LOAD", "START", "asks_for_list", "loading_calls", "reports"]

START, LOAD, FINISH = "from_pretrained", "_load_pretrained_model", "_finalize_model_loading"

#: Statements, and the names that each is about.
Loading = Mapping[ast.stmt, tuple[str, ...]]

_LIST = "output_loading_info"

_CONVERT = "convert_and_load_state_dict_in_model"
_ZERO3 = "_load_state_dict_into_zero3_model"


def asks_for_list(function: FunctionNode) -> Loading:
    """The statement of `START` that leads to `LOAD`, with the name of what the caller said of the list."""
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
    """The statements of `LOAD` that load, with the names of the state dict and of the model in each.

    One calls ``convert_and_load_state_dict_in_model``, and one may call what DeepSpeed's stage 3 has in its
    place. Empty where a release does it in another way.
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
    """The names of the state dict and the model; None if one of them is no name."""
    given: dict[str | None, ast.expr] = {each.arg: each.value for each in call.keywords}
    given |= dict(zip(("model", "state_dict"), call.args, strict=False))
    state_dict, model = given.get("state_dict"), given.get("model")
    if isinstance(state_dict, ast.Name) and isinstance(model, ast.Name):
        return state_dict.id, model.id
    return None


def reports(function: FunctionNode) -> Loading:
    """The end of `FINISH`, its only return, with the names of the model and of the report that it returns."""
    last = function.body[-1]
    names = [argument.arg for argument in function.args.args]
    returns = sum(isinstance(node, ast.Return) for node in walk_ast(function))
    if not (isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and returns == 1):
        return {}
    return {last: ("model", last.value.id)} if {"model", last.value.id} <= {*names} else {}
