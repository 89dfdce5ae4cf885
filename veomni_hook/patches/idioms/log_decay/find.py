"""Decays of linear attention: ``g = -exp(log_rate) * softplus(a + bias)``, in float32.

    beta = b.sigmoid()
    g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
      -> if (kernel := slot.kernel(self, a, self.A_log, self.dt_bias, b)) is not None:
             beta, g = kernel(a, self.A_log, self.dt_bias, b)

If another statement is between, or ``a`` is the result of a call, the decay alone goes to a kernel; the slot
is then asked with a tensor that the call gets. A decay for each channel: `channels`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import loaded
from veomni_hook.patches.code.statement_runs import Run, at_hand, simple_target
from veomni_hook.patches.code.tree import blocks, calls_in, last_name
from veomni_hook.patches.graph import Form, Node, constant
from veomni_hook.patches.idioms.log_decay.channels import OP, ChannelSearch, is_wide
from veomni_hook.patches.routes.guards import guard
from veomni_hook.patches.routes.view import Method, ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status, slot_name

__all__ = ["CANDIDATES", "OP", "find"]

CANDIDATES = (
    "every method with a statement that calls softplus and exp; every other forward that reads self.A_log and"
    " self.dt_bias and calls exp and one of softplus, sigmoid and log"
)

_ALONE, _BOTH = "softplus", "softplus_and_sigmoid"
_OPERANDS = ("a", "log_rate", "bias")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for _, owner, method in view.every_method():
        if not method.args.args or "exp(" not in (text := view.text(method)):
            continue
        sites = [*_Search(view, owner, method).sites()] if "softplus(" in text else []
        channels = ChannelSearch(view, owner, method)
        yield from sites or ([channels.site()] if channels.is_candidate() else [])


class _Search(Method):
    """Looks for decays in one method."""

    def __init__(self, view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> None:
        super().__init__(view, owner, method)
        self.reason = Reason("")

    def sites(self) -> Iterator[Site]:
        """The statements that look like a decay."""
        for block in blocks(self.method):
            for index, statement in enumerate(block):
                if simple_target(statement) is not None and _is_candidate(statement):
                    yield self.site(block, index)

    def site(self, block: list[ast.stmt], index: int) -> Site:
        lineno = block[index].lineno
        operands = self.operands(block, index)
        if operands is None:
            return Site(OP, self.target, Status.MISSED, reason=self.reason, lineno=lineno)
        b = self.sigmoid_before(block, index, operands)
        variant, taken = (_ALONE, operands) if b is None else (_BOTH, {**operands, "b": b})
        run = Run(self.method, block, index if b is None else index - 1, index)
        edits = self.guard(run, variant, taken)
        if edits is None:
            reason = Reason("the code around it cannot be reordered", Code.NO_ROOM)
            return Site(OP, self.target, Status.MISSED, reason=reason, lineno=lineno)
        captures = {name: ast.unparse(operand) for name, operand in taken.items()}
        return Site.asking(
            OP, self.target, variant, block[index], edits, form=self.digest(), captures=captures
        )

    def operands(self, block: list[ast.stmt], index: int) -> dict[str, ast.expr] | None:
        """The decay's operands, if the statement computes one."""
        form = self.form_of(Run(self.method, block, index, index))
        if not isinstance(form, Form):
            self.reason = form.why
            return None
        nodes = _read(form.result)
        if nodes is None:
            text = "expected -exp(log_rate) * softplus(a + bias), with float32 inside"
            self.reason = Reason(text, Code.OTHER_FORM)
            return None
        said = {name: self.expression(node) for name, node in nodes.items()}
        known = {name: operand for name, operand in said.items() if operand is not None}
        if len(known) < len(said) or any(call for name in _OPERANDS[1:] for call in calls_in(known[name])):
            self.reason = Reason("an operand of the decay is not an expression of this method", Code.NO_ROOM)
            return None
        return known

    def sigmoid_before(
        self, block: list[ast.stmt], index: int, operands: Mapping[str, ast.expr]
    ) -> ast.expr | None:
        """What the statement before takes the sigmoid of, if it does only that; the decay must not use it."""
        name = simple_target(block[index - 1]) if index else None
        if name is None or any(calls_in(operands["a"])) or name in loaded([block[index]]):
            return None
        form = self.form_of(Run(self.method, block, index - 1, index - 1))
        if not isinstance(form, Form) or form.result.op != "sigmoid":
            return None
        b = self.expression(form.result.args[0])
        return b if isinstance(b, ast.Name) and b.id != simple_target(block[index]) else None

    def guard(self, run: Run, variant: str, operands: Mapping[str, ast.expr]) -> tuple[Edit, ...] | None:
        asked = at_hand(operands["a"])
        if asked is None:
            return None
        names = ", ".join(simple_target(each) or "" for each in run.statements)
        rest = ", ".join(ast.unparse(operand) for name, operand in operands.items() if name != "a")
        answer = ast.parse(f"{names} = {self.kernel}({ast.unparse(operands['a'])}, {rest})").body
        asks = [self.receiver, asked, rest]
        comment = f"{OP}/{variant}: -exp(log_rate) * softplus(a + bias)"
        return guard(self.view, run, slot_name(OP, variant), asks, answer, comment, returns=False)


def _read(node: Node) -> dict[str, Node] | None:
    """The operands of ``-exp(float32(log_rate)) * softplus(float32(a) + bias)``."""
    product = node.args[0] if node.op == "neg" else node
    factors = {each.op: each for each in product.args} if node.op == "neg" and product.op == "mul" else {}
    if factors.keys() != {"exp", "softplus"}:
        return None
    rate, (z, *constants) = factors["exp"].args[0], factors["softplus"].args
    if (
        constants != [constant(1), constant(20)]
        or z.op != "add"
        or not (is_wide(rate) and is_wide(z.args[0]))
    ):
        return None
    return {"a": z.args[0].args[0], "log_rate": rate.args[0], "bias": z.args[1]}


def _is_candidate(statement: ast.stmt) -> bool:
    """Whether it calls softplus and exp."""
    return {last_name(call.func) for call in calls_in(statement)} >= {"softplus", "exp"}
