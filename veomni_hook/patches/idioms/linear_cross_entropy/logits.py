"""What code does to logits between the head and the loss, and what kernels do instead."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from veomni_hook.patches.code.comparison import serialise
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.site import Code, Missed

__all__ = ["FLOAT32", "STEPS", "Step", "is_not_none", "only_with", "options"]

#: The steps, and how they are written; no step is what changes nothing.
STEPS = [
    (kind, Template(text))
    for kind, text in (
        ("", "LOGITS.contiguous()"),
        ("tanh", "LOGITS.tanh()"),
        ("tanh", "torch.tanh(LOGITS)"),
        ("tanh", "torch.nn.functional.tanh(LOGITS)"),
        ("dtype", "LOGITS.float()"),
        ("dtype", "LOGITS.to(OPERAND)"),
        ("dtype", "LOGITS.to(dtype=OPERAND)"),
        ("divisor", "LOGITS / OPERAND"),
        ("scale", "LOGITS * OPERAND"),
        ("scale", "OPERAND * LOGITS"),
        ("capped_by", "OPERAND(LOGITS)"),
    )
]
#: The operand of a cast that is written without one.
FLOAT32 = ast.Attribute(ast.Name("torch", ast.Load()), "float32", ast.Load())
#: What kernels do to logits, in this order; one of the same number at most.
_ORDER = {"dtype": 0, "scale": 1, "divisor": 2, "softcap": 3, "capped_by": 3}


class Step(NamedTuple):
    """One operation on logits, with its operand; kernels skip it if that is None.

    ``dtype`` (a cast), ``scale``, ``divisor``, ``tanh``, or ``capped_by``, what a module of its own does.
    """

    kind: str
    operand: ast.expr | None


def is_not_none(value: ast.expr) -> ast.expr:
    """The test that a value is not None."""
    return ast.Compare(left=value, ops=[ast.IsNot()], comparators=[ast.Constant(None)])


def only_with(value: ast.expr, step: Step) -> Step:
    """A step that upstream does if ``value`` is not None, in a form that kernels skip if it is.

    Raises:
        Missed: they would not skip it.
    """
    if step.operand is None or serialise(step.operand) == serialise(value):
        return step
    if step.kind != "dtype":
        raise Missed(f"it is done with something else than {ast.unparse(value)}", value)
    return Step("dtype", ast.IfExp(is_not_none(value), step.operand, ast.Constant(None)))


def options(steps: Sequence[Step], node: ast.AST) -> dict[str, ast.expr]:
    """Steps as options of the kernel; dividing, ``tanh`` and multiplying back together are a soft cap.

    Raises:
        Missed: kernels do not support these steps, or not in this order.
    """
    operands: dict[str, ast.expr] = {}
    while steps:
        (kind, operand), *rest = steps
        if [step.kind for step in steps[:3]] == ["divisor", "tanh", "scale"]:
            if serialise(operand) == serialise(steps[2].operand):
                kind, rest = "softcap", [*steps[3:]]
        if operand is None or any(_ORDER[name] >= _ORDER[kind] for name in operands):
            raise Missed("logits are transformed in an unknown order", node, Code.OTHER_FORM)
        operands[kind], steps = operand, rest
    return operands
