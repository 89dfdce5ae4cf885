"""The prover of code for towers: without what the hook inserts, the patched text is upstream's.

What inserted code computes, tests compare with upstream: `tests/multimodal`, `tests/kernels/varlen_attention`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from tests.patches.idioms.applied import spliced
from tests.proof.call_sites import definition, with_copies_in_place
from tests.proof.compare import Differs
from tests.proof.provers import Proof, Unreached

_HOST = "veomni_host"
_CALL = "= veomni_absent.plus_zero("
_GUARDS = ("veomni_varlen_attention_full.kernel", "veomni_rows.joined")


def prove_tower(site: Any, module: Any) -> Proof:
    """A site's edits, taken back in their own text and in the patched module, leave upstream's code."""
    loader: Any = module.__spec__.loader
    upstream = Path(loader.upstream).read_text(encoding="utf-8")
    restored = _Restored()
    if ast.dump(restored.visit(with_copies_in_place(ast.parse(spliced(upstream, [site]))))) != ast.dump(
        ast.parse(upstream)
    ):
        raise Differs("what the site edits is not upstream's without the inserted code")
    patched = _Restored()
    patched.visit(definition(ast.parse(Path(module.__file__).read_text(encoding="utf-8")), site.target))
    if not restored.count or patched.count < restored.count:
        raise Unreached("the patched module lacks the inserted code")
    return Proof(gradients=0)


class _Restored(ast.NodeTransformer):
    """Takes the inserted code out, and counts it."""

    def __init__(self) -> None:
        self.count = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        kept = [each for each in node.decorator_list if _HOST not in ast.unparse(each)]
        self.count += len(node.decorator_list) - len(kept)
        node.decorator_list = kept
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if ast.unparse(node).startswith(f"{_HOST}.read_together("):
            self.count += 1
            return None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        # The operands of a guard; upstream's names are not these.
        if ast.unparse(node.targets[0]) == "operands" and isinstance(node.value, ast.Tuple):
            return None
        if re.fullmatch(rf"(\w+) = {_HOST}\.values\(\1\)", ast.unparse(node)):
            self.count += 1
            return None
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        alone = node.body[0] if len(node.body) == 1 and not node.orelse else None
        if isinstance(alone, ast.Assign) and _CALL in ast.unparse(alone):
            self.count += 1
            return None
        if any(guard in ast.unparse(node.test) for guard in _GUARDS):
            self.count += 1
            return [self.visit(each) for each in node.orelse]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("veomni_host"), attr=name), args=given):
                self.count += 1
                if name in {"values", "place", "sent"}:
                    return given[0]
                if name == "converted":
                    return given[1]
                if name in {"followed", "of_sizes"} and isinstance(given[0], ast.Lambda):
                    return given[0].body
                if name == "chosen":
                    return ast.Call(ast.Attribute(given[0], "bool", ast.Load()), [], [])
        return node
