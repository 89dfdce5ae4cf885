"""Where transformers decides whether attention needs a mask: ``transformers.masking_utils``.

Not kernel code: inserts calls of `veomni_hook.kernels.causal_mask.compiled`, for dynamo only, at the start of

* ``find_packed_sequence_indices``, which cannot read positions while tracing;
* ``_ignore_causal_mask_sdpa`` and ``_ignore_bidirectional_mask_sdpa``, which build a mask while they trace.

A function is recognised by its parameters, all of which the answer covers, and by the conditions that it
checks. If a release has different code, the site is a miss, which ``veomni-hook explain`` shows, and that
function stays as it is. A release whose functions do not ask whether they are traced has no site.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.routes.guards import before_body
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "causal_mask"
WORDS = "is_tracing | is_torchdynamo_exporting"
CANDIDATES = "nothing is counted: this is where masks are left out, and no kernel computes them"

_CODE = """\
if torch.compiler.is_dynamo_compiling():
    from veomni_hook.kernels.causal_mask.compiled import {answer}

    if {answer}({arguments}):
        return {result}
"""
_COMMENT = "torch.compile: no mask where none is needed without it"
#: What reports show after the op; no kernel has this name.
_VARIANT = "left_out_when_compiled"
_TRACES = ("is_tracing", "is_torchdynamo_exporting")


@dataclass(frozen=True)
class _Decision:
    """A function of upstream's, by parameters: what it must contain, and the answer to ask for.

    ``{q}`` is the name that a release has for the number of queries. Each condition may have several forms.
    """

    answer: str
    arguments: tuple[str, ...]
    result: str
    conditions: tuple[tuple[Template, ...], ...]
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


_WINDOW = (Template("kv_length < local_attention_size"), Template("kv_length >= local_attention_size"))
#: Positions of one sequence increase by one from the first.
_STEPS = Template(
    """
...
FIRST = position_ids[:, :1] - 1
DIFFERENCES = torch.diff(position_ids, prepend=FIRST, dim=-1)
SEQUENCES = (DIFFERENCES != 1).cumsum(-1)
...
"""
)
_DECISIONS = {
    "find_packed_sequence_indices": _Decision(
        "is_one_sequence",
        ("position_ids",),
        "None",
        ((_STEPS,), (Template("(SEQUENCES[:, -1] == 0).all()"),)),
    ),
    "_ignore_causal_mask_sdpa": _Decision(
        "is_causal_suffices",
        ("padding_mask", "{q}", "kv_length", "local_attention_size"),
        "True",
        ((Template("QUERIES == 1 or kv_length == QUERIES"),), _WINDOW),
        optional=("q_offset",),
        ignored=("kv_offset",),
    ),
    "_ignore_bidirectional_mask_sdpa": _Decision(
        "needs_no_mask",
        ("padding_mask", "kv_length", "local_attention_size"),
        "True",
        ((Template("padding_mask is None or padding_mask.all()"),), _WINDOW),
    ),
}


def find(view: ModuleView) -> Iterator[Site]:
    """The functions of transformers' own module; nothing elsewhere."""
    for name, decision in _DECISIONS.items():
        function = view.functions.get(name)
        if function is None or not any(
            isinstance(node, ast.Name) and node.id in _TRACES for node in walk_ast(function)
        ):
            continue
        site = Site(OP, name, Status.MISSED, counted=False, lineno=function.lineno)
        try:
            code = _code(view, function, decision)
        except Missed as missed:
            yield replace(site, reason=missed.reason)
        else:
            edits = before_body(view, function, code, _COMMENT)
            reason = f"asks {decision.answer} under torch.compile"
            yield replace(site, status=Status.ROUTED, variant=_VARIANT, reason=reason, edits=edits)


def _code(view: ModuleView, function: FunctionNode, decision: _Decision) -> str:
    """The guard for a function.

    Raises:
        Missed: its parameters or its conditions are others, or the module does not import torch.
    """
    names = [argument.arg for argument in function.args.args]
    queries = "query_length" if "query_length" in names else "q_length"
    arguments = [name.format(q=queries) for name in decision.arguments]
    if unknown := ({*names} ^ {*arguments}) - {*decision.optional, *decision.ignored}:
        raise Missed(f"its parameters differ: {', '.join(sorted(unknown))}", function, Code.OTHER_ARGUMENTS)
    for forms in decision.conditions:
        if not any(form.is_in(function) for form in forms):
            raise Missed(f"it has no {forms[0]}", function, Code.OTHER_FORM)
    imported = (one for node in view.document.tree.body if isinstance(node, ast.Import) for one in node.names)
    if not any(one.name == "torch" and not one.asname for one in imported):
        raise Missed("the module does not import torch", code=Code.REPLACED)
    arguments += [name for name in decision.optional if name in names]
    return _CODE.format(answer=decision.answer, arguments=", ".join(arguments), result=decision.result)
