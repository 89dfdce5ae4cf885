"""Index scores: a run of statements, from the product of queries and keys to the sum over heads.

    scores = F.relu(torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * self.softmax_scale)
    weights = self.weights_proj(x).float()
    index_scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)
      -> if (kernel := slot.kernel(self, q, k, self.softmax_scale)) is not None:
             index_scores = kernel(q, k, self.weights_proj(x).float(), self.softmax_scale)

Mask and selection stay upstream's. The weights may be computed within the run or before it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from veomni_hook.patches.code.statement_runs import Run, put_together, simple_target
from veomni_hook.patches.code.tree import blocks
from veomni_hook.patches.graph import ARGUMENT, NUMBER, Difference, Form, constant, digest, recognised
from veomni_hook.patches.idioms.shared import has_receiver
from veomni_hook.patches.routes.guards import guard
from veomni_hook.patches.routes.view import Method, ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status, slot_name
from veomni_hook.patterns import pattern_file

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "index_scores"
WORDS = "matmul( | einsum("
CANDIDATES = (
    "every forward of a class whose name contains Indexer that calls matmul or einsum; elsewhere, every"
    " method that calls relu and has one of the formulas"
)

_PRODUCT = re.compile(r"\b(matmul|einsum)\(")
_SUM = re.compile(r"\b(matmul|einsum|sum)\(")
_RULES = {"query": ARGUMENT, "key": ARGUMENT, "scale": NUMBER}
_OPERANDS = ("query", "key", "weights", "scale")
# Statements from the product to the sum: four in transformers 5.2 to 5.23.
_LONGEST = 6


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for _, owner, method in view.every_method():
        text = view.text(method)
        expected = method.name == "forward" and "Indexer" in owner.name
        if has_receiver(method) and _PRODUCT.search(text) and (expected or "relu(" in text):
            site = _Search(view, owner, method).site()
            if expected or site.status is Status.ROUTED:
                yield site


class _Search(Method):
    """Looks for one of the formulas in a method."""

    reason = Reason(
        "nothing has the form of products that are weighted and added up over heads", Code.OTHER_FORM
    )

    def site(self) -> Site:
        """The method as a site."""
        for block in blocks(self.method):
            for last in range(len(block) - 1, -1, -1):
                if not _SUM.search(self.view.text(block[last])):
                    continue
                for run in Run(self.method, block, last, last).longer(_LONGEST):
                    if (site := self.routed(run)) is not None:
                        return site
        return Site(OP, self.target, Status.MISSED, reason=self.reason, lineno=self.method.lineno)

    def routed(self, run: Run) -> Site | None:
        """The site, if the run computes one of the formulas and the code around it allows a guard."""
        target = simple_target(run.statements[-1])
        if target is None and not isinstance(run.statements[-1], ast.Return):
            return None
        form = self.form_of(run)
        if not isinstance(form, Form) or form.effects:
            return None
        outcome = recognised(pattern_file(OP), form, _RULES)
        if isinstance(outcome, Difference):
            return None
        name, matched = outcome
        variant = name.partition("__")[0]
        nodes = {**matched.bindings, "scale": matched.bindings.get("scale", constant(1.0))}
        operands = {
            name: expression for name in _OPERANDS if (expression := self.expression(nodes[name])) is not None
        }
        value = getattr(run.statements[-1], "value")  # noqa: B009 - an assignment or a return
        result, edits = None, None
        if len(operands) == len(_OPERANDS):
            result = put_together(run.statements, value, operands, self.kernel)
        if result is not None:
            answer = ast.Assign([ast.Name(target, ast.Store())], result) if target else ast.Return(result)
            known = ", ".join(ast.unparse(operands[name]) for name in _OPERANDS if name != "weights")
            asked, slot = [self.receiver, known], slot_name(OP, variant)
            comment = f"{OP}/{variant}: weighted products, added up over heads"
            edits = guard(self.view, run, slot, asked, [answer], comment, returns=False)
        if edits is None:
            said = f"the code around line {value.lineno} cannot be reordered"
            self.reason = Reason(said, Code.NO_ROOM)
            return None
        computed = self.digest() or digest(form)
        captures = {name: ast.unparse(operand) for name, operand in operands.items()}
        return Site.asking(OP, self.target, variant, value, edits, form=computed, captures=captures)
