"""Attention by segment: a guard in front of the statements that split query, key and value.

One call of a kernel replaces a call of the attention function for each segment. The guard stands where
upstream's condition has already excluded flash attention, so it never replaces what a user chose there; which
other function was chosen is an operand, and kernels check it. What an attention function returns besides the
output is kept or dropped. transformers' fused attention returns None there, so a kernel that replaces only
that function knows it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import free_name, loaded, parameter_names
from veomni_hook.patches.code.statement_runs import Run
from veomni_hook.patches.code.template import Found, Mismatch, Template
from veomni_hook.patches.code.tree import blocks, walk_ast
from veomni_hook.patches.idioms.shared import check_self
from veomni_hook.patches.routes.guards import guard
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Site, Status, slot_name

__all__ = ["CANDIDATES", "OP", "VARIANT", "WORDS", "find", "read"]

OP = "varlen_attention"
VARIANT = "full"
WORDS = "cu_seqlens get_interface"
CANDIDATES = (
    "every method with a parameter whose name contains cu_seqlens that looks an attention function up"
    " (get_interface)"
)

_BOUNDARIES = "cu_seqlens"
_LOOK_UP = "get_interface"
_TENSORS = ("QUERY", "KEY", "VALUE", "CU_SEQLENS")

LENGTHS = Template("LENGTHS = CU_SEQLENS[1:] - CU_SEQLENS[:-1]", names="CU_SEQLENS")
#: To the end of a block. ABSENT is what holds no weights in the end.
SEGMENTS = Template(
    """
LENGTHS = CU_SEQLENS[1:] - CU_SEQLENS[:-1]
SPLITS = [torch.split(TENSOR, LENGTHS.tolist(), dim=2) for TENSOR in (QUERY, KEY, VALUE)]
if either:
    OUTPUT = torch.cat([ATTEND(self, Q, K, V, **OPTIONS)[0] for Q, K, V in zip(*SPLITS)], dim=1)
elif either:
    OUTPUTS, WEIGHTS = [], []
    for Q, K, V in zip(*SPLITS):
        PART, WEIGHT = ATTEND(self, Q, K, V, **OPTIONS)
        OUTPUTS.append(PART)
        WEIGHTS.append(WEIGHT)
    OUTPUT = torch.cat(OUTPUTS, dim=1)
    if maybe:
        ABSENT = None if WEIGHTS[0] is None else ALL
elif either:
    PAIRS = [ATTEND(self, Q, K, V, **OPTIONS) for Q, K, V in zip(*SPLITS)]
    OUTPUT = torch.cat([PAIR[0] for PAIR in PAIRS], dim=1)
    ABSENT = None
    if PAIRS[0][1] is not None:
        ...
else:
    OUTPUTS = [ATTEND(self, Q, K, V, **OPTIONS)[0] for Q, K, V in zip(*SPLITS)]
    OUTPUT = torch.cat(OUTPUTS, dim=1)
if maybe:
    ABSENT = None
""",
    names="CU_SEQLENS QUERY KEY VALUE ATTEND",
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, _, method in view.every_method():
        if any(_BOUNDARIES in parameter_name for parameter_name in parameter_names(method)) and any(
            isinstance(node, ast.Attribute) and node.attr == _LOOK_UP for node in walk_ast(method)
        ):
            yield _site(view, target, method)


def _site(view: ModuleView, target: str, method: FunctionNode) -> Site:
    try:
        check_self(method)
        segments = read(method)
        if segments is None:
            raise Missed("it does not split query, key and value at the boundaries", code=Code.NO_BOUNDARIES)
        run = Run(method, [*segments.block], segments.index, len(segments.block) - 1)
        collected, answer = _written(method, segments)
        edits = guard(
            view,
            run,
            slot_name(OP, VARIANT),
            ["self", f"*{free_name(method, 'operands')}"],
            answer,
            f"{OP}/{VARIANT}: one call for all segments",
            returns=False,
            before=collected,
        )
        if edits is None:
            text = "code after the segments reads more than the output"
            raise Missed(text, segments.first, Code.USED_OTHERWISE)
    except Missed as missed:
        return Site(OP, target, Status.MISSED, reason=missed.reason, lineno=method.lineno)
    captures = {name.lower(): segments[name] for name in _TENSORS}
    return Site.asking(OP, target, VARIANT, segments.first, edits, captures=captures)


def _written(method: FunctionNode, segments: Found) -> tuple[str, list[ast.stmt]]:
    """The statement that collects the operands, and the statements for the case that there is a kernel."""
    kernel, operands = free_name(method, "kernel"), free_name(method, "operands")
    arguments = "".join(f"        {ast.unparse(node)},\n" for node in segments.bound["OPTIONS"].nodes)
    tensors = ", ".join(segments[name] for name in (*_TENSORS, "ATTEND"))
    options = f"    dict(\n{arguments}    ),\n" if arguments else "    {},\n"
    collected = f"{operands} = (\n    {tensors},\n{options})\n"
    answer = f"{segments['OUTPUT']} = {kernel}(*{operands})\n"
    # What the segments do besides, where a function returns no weights.
    weights, absent = segments["WEIGHTS"], segments["ABSENT"]
    if weights not in ("", absent):
        answer += f"{weights} = [None] * (len({segments['CU_SEQLENS']}) - 1)\n"
    return collected, ast.parse(answer + (f"{absent} = None\n" if absent else "")).body


def read(function: FunctionNode) -> Found | None:
    """The segments that a method computes attention for; None if it takes no lengths of any.

    Raises:
        Missed: it does, but goes on in an unknown way.
    """
    if not any(LENGTHS.match(statement) for block in blocks(function) for statement in block):
        return None
    segments = SEGMENTS.find(blocks(function))
    if isinstance(segments, Mismatch):
        raise Missed(str(segments), segments.node, Code.OTHER_FORM)
    options = [node.value for node in segments.bound["OPTIONS"].nodes if isinstance(node, ast.keyword)]
    if not {segments[name] for name in "QKV"}.isdisjoint(loaded(options)):
        raise Missed("an argument of the call depends on the segment", segments.first, Code.READS_VALUES)
    return segments
