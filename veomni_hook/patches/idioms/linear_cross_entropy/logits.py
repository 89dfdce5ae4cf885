"""Follow logits through expressions: which names hold them, and which steps were applied so far."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from veomni_hook.patches.code.comparison import serialise
from veomni_hook.patches.code.scope import used_names
from veomni_hook.patches.code.tree import binding, chain, is_plain, substituted
from veomni_hook.patches.site import Missed

__all__ = ["Logits", "Step", "needed", "options"]

_TANH = ("torch.tanh", "torch.nn.functional.tanh")
_TORCH = ast.Name(id="torch", ctx=ast.Load())
_FLOAT32 = ast.Attribute(value=_TORCH, attr="float32", ctx=ast.Load())
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
            raise Missed(f"logits come from {ast.unparse(value)[:60]}, where no head is called", statement)
        if steps is None:
            raise Missed("logits are used in another way", statement)
        self.held[name] = steps
        self.locals.pop(name, None)

    def steps(self, node: ast.expr) -> tuple[Step, ...] | None:
        """The steps that an expression applies to logits; None if it is not understood."""
        if isinstance(node, ast.Name):
            return self.held.get(node.id)
        if isinstance(node, ast.BinOp):
            return self._multiplied(node)
        return self._called(node) if isinstance(node, ast.Call) else None

    def _called(self, node: ast.Call) -> tuple[Step, ...] | None:
        alone = len(node.args) == 1 and not node.keywords
        if alone and (cap := self.cap(node.func)) is not None:
            return self._then(node.args[0], Step("capped_by", cap))
        if self.head is None and chain(node.func).startswith("self."):
            self.head = node
            return ()
        if alone and self.resolve(node.func) in _TANH:
            return self._then(node.args[0], Step("tanh"))
        return self._method(node, node.func) if isinstance(node.func, ast.Attribute) else None

    def _method(self, node: ast.Call, function: ast.Attribute) -> tuple[Step, ...] | None:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if function.attr == "to" and len(given) == 1 and self.resolve(given[0]).startswith("torch."):
            return self._then(function.value, Step("dtype", given[0]))
        if given:
            return None
        if function.attr == "contiguous":
            return self.steps(function.value)
        step = {"tanh": Step("tanh"), "float": Step("dtype", _FLOAT32)}.get(function.attr)
        return None if step is None else self._then(function.value, step)

    def _multiplied(self, node: ast.BinOp) -> tuple[Step, ...] | None:
        left, right = node.left, node.right
        if isinstance(node.op, ast.Mult) and self.mentioned(right):
            left, right = right, left
        kind = {ast.Mult: "scale", ast.Div: "divisor"}.get(type(node.op))
        if kind is None or self.mentioned(right):
            return None
        return self._then(left, Step(kind, self.known(right)))

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
            raise Missed("logits are transformed in an unknown order", node)
        found[step.kind] = step.operand
        del left[:count]
    return found
