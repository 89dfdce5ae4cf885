"""Follow logits through expressions: which names hold them, and which steps were applied so far."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from veomni_hook.patches.code.comparison import serialise
from veomni_hook.patches.code.scope import used_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import binding, chain, is_plain, substituted
from veomni_hook.patches.site import Code, Missed

__all__ = ["Logits", "Step", "needed", "options"]

#: What code does to logits: the step, and how it is written; no step is what changes nothing.
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
    )
]
#: The operand of a step that is written without one.
_OPERANDS: dict[str, ast.expr] = {
    "dtype": ast.Attribute(ast.Name("torch", ast.Load()), "float32", ast.Load())
}
#: What kernels do to logits, in this order; one of the same number at most.
_ORDER = {"dtype": 0, "scale": 1, "divisor": 2, "softcap": 3, "capped_by": 3}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on logits, with its operand: ``dtype`` (a cast), ``scale``, ``divisor``, ``tanh``, or
    ``capped_by``, what a module of its own does.

    ``optional``: upstream skips the step if the operand is None; otherwise None is an error in upstream.
    """

    kind: str
    operand: ast.expr | None = None
    optional: bool = False

    @property
    def code(self) -> str:
        """The operand in comparable form."""
        return "" if self.operand is None else serialise(self.operand)


@dataclass
class Logits:
    """What is known at one point of a ``forward``.

    Attributes:
        resolve: returns the full name of an expression according to the module's imports.
        cap: returns the operand of ``capped_by`` for a called module that only caps logits, or None.
        head: the call that computes logits; None until it is found.
        held: the names that hold logits, with the steps applied to them.
        locals: names bound since then to plain expressions, in terms of names from before the head.
    """

    resolve: Callable[[ast.expr], str]
    cap: Callable[[ast.expr], ast.expr | None]
    head: ast.Call | None = None
    held: dict[str, tuple[Step, ...]] = field(default_factory=dict)
    locals: dict[str, ast.expr] = field(default_factory=dict)

    def copy(self) -> Logits:
        """An independent copy."""
        return replace(self, held=dict(self.held), locals=dict(self.locals))

    def mentioned(self, node: ast.AST) -> bool:
        """Whether code uses a name that holds logits."""
        return not self.held.keys().isdisjoint(used_names([node]))

    def known(self, node: ast.expr) -> ast.expr:
        """A plain expression in terms of names from before the call of the head.

        Raises:
            Missed: it is not plain, or uses logits.
        """
        if self.mentioned(node) or not is_plain(node):
            raise Missed(f"{ast.unparse(node)} is not plain", node)
        return substituted(node, self.locals)

    def bind(self, statement: ast.stmt) -> None:
        """Read a statement that computes logits or changes them, and does nothing else.

        Raises:
            Missed: it does something else.
        """
        name, value = binding(statement)
        steps = None if value is None else self.steps(value)
        if value is not None and self.head is None:
            raise Missed(
                f"logits come from {ast.unparse(value)[:60]}, where no head is called",
                statement,
                Code.OTHER_FORM,
            )
        if steps is None:
            raise Missed("logits are used in another way", statement, Code.USED_OTHERWISE)
        self.held[name] = steps
        self.locals.pop(name, None)

    def steps(self, node: ast.expr) -> tuple[Step, ...] | None:
        """The steps that an expression applies to logits; None if it is not understood.

        Raises:
            Missed: an operand is not plain.
        """
        if isinstance(node, ast.Name):
            return self.held.get(node.id)
        if isinstance(node, ast.Call):
            if len(node.args) == 1 and not node.keywords and (cap := self.cap(node.func)) is not None:
                return self._then(node.args[0], Step("capped_by", cap))
            if self.head is None and chain(node.func).startswith("self."):
                self.head = node
                return ()
        for kind, template in STEPS:
            found = template.match(node, self.resolve)
            operand = found.expression("OPERAND") if found and "OPERAND" in found.bound else None
            if found is None or (operand is not None and self.mentioned(operand)):
                continue
            logits = found.expression("LOGITS")
            if kind == "dtype" and operand is not None and not self.resolve(operand).startswith("torch."):
                return None
            if kind in ("scale", "divisor") and operand is not None:
                operand = self.known(operand)
            return (
                self._then(logits, Step(kind, operand or _OPERANDS.get(kind))) if kind else self.steps(logits)
            )
        return None

    def _then(self, node: ast.expr, step: Step) -> tuple[Step, ...] | None:
        steps = self.steps(node)
        return None if steps is None else (*steps, step)


def needed(steps: Sequence[Step]) -> list[ast.expr]:
    """Tests that the operands which upstream uses unconditionally are not None.

    Kernels skip an operand that is None.
    """
    found: dict[str, ast.expr] = {}
    for step in steps:
        if step.kind in ("scale", "divisor") and step.operand is not None and not step.optional:
            if not isinstance(step.operand, ast.Constant):
                test = ast.Compare(left=step.operand, ops=[ast.IsNot()], comparators=[ast.Constant(None)])
                found[step.code] = test
    return list(found.values())


def options(steps: Sequence[Step], node: ast.AST) -> dict[str, ast.expr]:
    """Steps as options of the kernel; dividing, ``tanh`` and multiplying back together are a soft cap.

    Raises:
        Missed: kernels do not support these steps, or not in this order.
    """
    found: dict[str, ast.expr] = {}
    left = list(steps)
    while left:
        step, count = left[0], 1
        if [s.kind for s in left[:3]] == ["divisor", "tanh", "scale"] and left[0].code == left[2].code:
            step, count = Step("softcap", left[0].operand), 3
        if step.operand is None or any(_ORDER[name] >= _ORDER[step.kind] for name in found):
            raise Missed("logits are transformed in an unknown order", node, Code.OTHER_FORM)
        found[step.kind] = step.operand
        del left[:count]
    return found
