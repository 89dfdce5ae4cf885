"""Reads the statements that compute attention segment by segment.

What an attention function returns besides the output is kept or dropped. transformers' fused attention
returns None there, so a kernel that replaces only that function knows it.
"""

from __future__ import annotations

import ast

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import loaded
from veomni_hook.patches.code.statements import blocks
from veomni_hook.patches.code.template import Found, Mismatch, Template
from veomni_hook.patches.site import Missed

__all__ = ["read", "weights_without_a_kernel"]

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


def read(function: FunctionNode) -> Found | None:
    """The segments that a method computes attention for; None if it takes no lengths of any.

    Raises:
        Missed: it does, but goes on in an unknown way.
    """
    if not any(LENGTHS.match(statement) for block in blocks(function) for statement in block):
        return None
    found = SEGMENTS.find(blocks(function))
    if isinstance(found, Mismatch):
        raise Missed(str(found), found.node)
    options = [each.value for each in found.bound["OPTIONS"].nodes if isinstance(each, ast.keyword)]
    if not {found[name] for name in "QKV"}.isdisjoint(loaded(options)):
        raise Missed("an argument of the call depends on the segment", found.first)
    return found


def weights_without_a_kernel(found: Found) -> str:
    """Statements that assign what the segments do besides the output, where a function returns no weights."""
    weights, absent = found["WEIGHTS"], found["ABSENT"]
    each = f"{weights} = [None] * (len({found['CU_SEQLENS']}) - 1)\n" if weights not in ("", absent) else ""
    return f"{each}{absent} = None\n" if absent else each
