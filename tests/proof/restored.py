"""The prover of inserted code: without it, what a site edits is upstream's text, and the patched module has it.

What inserted code computes, tests compare with upstream: `tests/multimodal`, and those of the kernels.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import Any

from tests.patches.idioms.applied import spliced
from tests.proof.compare import Differs
from tests.proof.provers import Proof, Unreached
from tests.proof.texts import patched, upstream_of, with_copies_in_place

_HOST = "veomni_host"
_GUARDS = ("veomni_varlen_attention_full.kernel", "veomni_rows.joined", "veomni_head_parts_joined.kernel")
#: Statements that are inserted as a whole, by what they are.
_STATEMENTS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (ast.Expr, rf"{_HOST}\.(read_together|counted)\("),
        (ast.Expr, r"veomni_boundaries\.refuse\("),
        (ast.Assign, r"[^=]+ = veomni_boundaries\.found\("),
        (ast.Assign, rf"(\w+) = {_HOST}\.values\(\1\)$"),
        (ast.If, r"[^\n]+\n +[^=\n]+ = veomni_absent\.plus_zero\([^\n]+$"),
    )
)


def prove_inserted_code(site: Any, module: Any) -> Proof:
    """A site's edits, taken back in their own text and in the patched module, leave upstream's code."""
    upstream = upstream_of(module)
    slots = {slot.name for slot in site.slots}
    own, all_ = _Restored(slots), _Restored(slots)
    edited = with_copies_in_place(ast.parse(spliced(upstream, [site])))
    if ast.dump(own.visit(edited)) != ast.dump(ast.parse(upstream)):
        raise Differs("what the site edits is not upstream's without the inserted code")
    all_.visit(patched(module, site.target))
    if not own.found or own.found - all_.found:
        raise Unreached(f"the patched module lacks inserted code: {own.found - all_.found}")
    return Proof(gradients=0)


class _Restored(ast.NodeTransformer):
    """Takes inserted code out, and counts it by what it is."""

    def __init__(self, slots: set[str]) -> None:
        self.slots = slots
        self.found: Counter[str] = Counter()

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt):
            for kind, pattern in _STATEMENTS:
                if isinstance(node, kind) and pattern.match(ast.unparse(node)):
                    self.found[pattern.pattern] += 1
                    return None
        return super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        kept = [each for each in node.decorator_list if _HOST not in ast.unparse(each)]
        self.found["decorator"] += len(node.decorator_list) - len(kept)
        node.decorator_list = kept
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        # The operands of a guard; upstream's names are not these.
        guarded = ast.unparse(node.targets[0]) == "operands" and isinstance(node.value, ast.Tuple)
        return None if guarded else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        test = ast.unparse(node.test)
        for guard in _GUARDS:
            if guard in test:
                self.found[guard] += 1
                return [self.visit(each) for each in node.orelse]
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if ast.unparse(node.values[-1]).startswith("veomni_boundaries.makes_cache("):
            self.found["makes_cache"] += 1
            return self.visit(node.values[0])
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        made = self._called(node)
        if made is not node:
            self.found[ast.unparse(node.func)] += 1
        return made

    def _called(self, node: ast.Call) -> ast.AST:
        """What stands in upstream's text for a call of a helper or a slot; the call itself where it is upstream's."""
        if not isinstance(node.func, ast.Attribute) or not isinstance(node.func.value, ast.Name):
            return node
        given, owner, name = node.args, node.func.value.id, node.func.attr
        match owner, name:
            case "veomni_host", "values" | "place" | "sent" | "converted":
                return given[name == "converted"]
            case "veomni_host", "followed" | "of_sizes" if isinstance(given[0], ast.Lambda):
                return given[0].body
            case "veomni_host", "chosen":
                return ast.Call(ast.Attribute(given[0], "bool", ast.Load()), [], [])
            case "veomni_counts", "selected":
                return ast.Call(ast.Attribute(ast.Subscript(*given, ast.Load()), "numel", ast.Load()), [], [])
            case "veomni_counts", "check" if _is_message(given[2]):
                return ast.Call(given[0], [given[1], given[2].body], [])  # type: ignore[attr-defined]
            case _, "separated" if len(given) >= 3:
                return given[2]
            case _, "call" if owner in self.slots and getattr(given[0], "id", "") == "self":
                return _skipped(given[1], given[2:])
        return node


def _skipped(function: ast.expr, operands: list[ast.expr]) -> ast.Call:
    """The call that a slot may skip, as upstream writes it."""
    match ast.unparse(function):
        case "torch.Tensor.masked_scatter":
            return ast.Call(ast.Attribute(operands[0], "masked_scatter", ast.Load()), operands[1:], [])
        case "torch.split" | "torch.cat":
            return ast.Call(function, operands[:-1], [ast.keyword("dim", operands[-1])])
    return ast.Call(function, operands, [])


def _is_message(node: ast.expr) -> bool:
    """Whether this is a function that binds locals under their own names."""
    if not isinstance(node, ast.Lambda):
        return False
    return [each.arg for each in node.args.args] == [ast.unparse(each) for each in node.args.defaults]
