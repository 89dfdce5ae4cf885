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
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import calls_in, last_name, walk_ast
from veomni_hook.patches.routes.guards import before_statement
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "moe_experts"
WORDS = "_load_pretrained_model"
CANDIDATES = "nothing is counted: this is where checkpoints are loaded, not experts"

_START, _LOAD, _FINISH = "from_pretrained", "_load_pretrained_model", "_finalize_model_loading"
_CONVERT, _ZERO3 = "convert_and_load_state_dict_in_model", "_load_state_dict_into_zero3_model"
#: What loads; the other is DeepSpeed's equivalent for stage 3, which may be absent.
LOADS = (
    Template(f"{_CONVERT}(model=MODEL, state_dict=STATES, **OPTIONS)", names="MODEL STATES"),
    Template(f"{_ZERO3}(MODEL, STATES, *OTHERS)", names="MODEL STATES"),
)
LIST = Template("output_loading_info = VALUE")
REPORT = Template("return REPORT", names="REPORT")
#: Statements, each with the names that it uses.
Loading = Mapping[ast.stmt, tuple[str, ...]]

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
            unknown = Reason("the loading code is unknown", Code.OTHER_FORM)
            reason = "checks the checkpoint's experts" if edits else unknown
            at, line = f"{owner.name}.{name}", methods[name].lineno
            yield Site(OP, at, status, reason=reason, edits=tuple(edits), counted=False, lineno=line)


def _asks_for_list(function: FunctionNode) -> Loading:
    """The statement that calls ``_load_pretrained_model``, with ``output_loading_info`` if that is bound."""
    leading = [
        statement
        for statement in function.body
        if any(isinstance(node, ast.Attribute) and node.attr == _LOAD for node in walk_ast(statement))
    ]
    known = len(leading) == 1 and any(map(LIST.match, function.body))
    return {leading[0]: ("output_loading_info",)} if known else {}


def _loading_calls(function: FunctionNode) -> Loading:
    """The statements that load, each with its names for the state dict and the model.

    Empty if a release loads in another way.
    """
    assigned = [node for node in walk_ast(function) if isinstance(node, ast.Assign)]
    loads = {node: load for node in assigned for form in LOADS if (load := form.match(node.value))}
    called = [last_name(call.func) for call in calls_in(function)]
    converts, shards = called.count(_CONVERT), called.count(_ZERO3)
    known = converts == 1 and shards <= 1 and len(loads) == converts + shards
    return {node: (load["STATES"], load["MODEL"]) for node, load in loads.items() if known}


def _reports(function: FunctionNode) -> Loading:
    """The only return, at the end, with the names of the model and of the returned report."""
    last = function.body[-1]
    report = REPORT.match(last)
    returns = sum(isinstance(node, ast.Return) for node in walk_ast(function))
    used = ("model", report["REPORT"]) if report and returns == 1 else ()
    return {last: used} if used and {*used} <= {argument.arg for argument in function.args.args} else {}
