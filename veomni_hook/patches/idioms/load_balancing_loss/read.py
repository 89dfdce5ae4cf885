"""Read a function that may compute the loss: its form in each case, without the branches decided there.

List comprehensions also become loops, and in-place additions to a new tensor become out-of-place ones, so
that the canonical form can follow them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from functools import cache

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import chain, walk_ast
from veomni_hook.patches.graph import Form, Scope, Unknown, canonical, reference_scope
from veomni_hook.patterns import pattern_file

__all__ = ["OP", "Case", "forms", "spellings"]

OP = "load_balancing_loss"
_IN_PLACE = "scatter_add_"
# Whether the logits are None, whether they are a tuple, whether the mask is None.
_CASES = ((True, False, True), (False, False, True), (False, True, True), (False, True, False))


@cache
def spellings() -> tuple[tuple[str, tuple[Form, ...]], ...]:
    """The forms of every spelling, each with its variant."""
    found = []
    for path, variant in (("reference.py", ""), ("spellings.py", "softmax_topk")):
        scope = reference_scope(pattern_file(OP, path))
        for name, function in scope.functions.items():
            made = forms(function, scope)
            if not isinstance(made, Unknown):
                found.append((variant or name, made))
    return tuple(found)


def forms(function: FunctionNode, scope: Scope) -> tuple[Form, ...] | Unknown:
    """The forms of a function for each case of `_CASES`: kinds of logits, with and without a mask."""
    parameters = [parameter.arg for parameter in function.args.args]
    if len(parameters) < 2:
        return Unknown("it takes no logits and mask", function.lineno)
    found = []
    for absent, is_tuple, unmasked in _CASES:
        facts = {
            f"{parameters[0]} is None": absent,
            f"isinstance({parameters[0]}, tuple)": is_tuple,
            f"{parameters[-1]} is None": unmasked,
        }
        special = copy.copy(function)
        special.body = Case(facts).block(function.body)
        form = canonical(special, scope, body=special.body)
        if isinstance(form, Unknown):
            return form
        found.append(form)
    return tuple(found)


class Case(ast.NodeTransformer):
    """Rewrites a function for one case: drops decided tests and turns list comprehensions into loops.

    The input does not change; changed nodes are copies.

    Args:
        facts: tests as text, with their outcomes.
    """

    def __init__(self, facts: Mapping[str, bool]) -> None:
        self.facts = facts
        self.before: list[ast.stmt] = []
        self.count = 0

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """The remaining statements of a block."""
        made: list[ast.stmt] = []
        for statement in statements:
            outcome = self.outcome(statement.test) if isinstance(statement, ast.If) else None
            if isinstance(statement, ast.If) and outcome is not None:
                made += self.block(statement.body if outcome else statement.orelse)
                continue
            written = self._written(statement)
            made += [*self.before, written]
            self.before = []
        return made

    def _written(self, statement: ast.stmt) -> ast.stmt:
        if hasattr(statement, "body"):
            made = copy.copy(statement)
            for name in ("body", "orelse"):
                if inner := getattr(statement, name, None):
                    setattr(made, name, self.block(inner))
            return made
        if not any(map(_is_rewritten, walk_ast(statement))):
            return statement
        written: ast.stmt = self.visit(copy.deepcopy(statement))
        return written

    def outcome(self, test: ast.expr) -> bool | None:
        """The outcome of a test according to the facts; None if it is unknown."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.outcome(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            decisive = isinstance(test.op, ast.Or)
            found = [self.outcome(value) for value in test.values]
            return decisive if decisive in found else None if None in found else not decisive
        text = ast.unparse(test)
        negated = text.replace(" is not ", " is ")
        return not self.facts[negated] if text != negated and negated in self.facts else self.facts.get(text)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace an in-place addition to a tensor without other references by an out-of-place one."""
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == _IN_PLACE:
            made = function.value
            if isinstance(made, ast.Call) and chain(made.func) == "torch.zeros":
                function.attr = "scatter_add"
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        """Fill the list in a loop before the statement, so that names of loop variables do not matter."""
        generator = node.generators[0]
        if len(node.generators) > 1 or generator.ifs or generator.is_async:
            return node
        self.count += 1
        name = f"veomni_list_{self.count}"
        empty, loop = ast.parse(f"{name} = ()\nfor each in (): {name} = {name} + (each,)").body
        assert isinstance(loop, ast.For)  # noqa: S101
        loop.target, loop.iter = generator.target, generator.iter
        added = next(inner for inner in walk_ast(loop.body[0]) if isinstance(inner, ast.Tuple))
        added.elts = [node.elt]
        self.before += [empty, loop]
        return ast.copy_location(ast.Name(name, ast.Load()), node)


def _is_rewritten(node: ast.AST) -> bool:
    return isinstance(node, ast.ListComp) or (isinstance(node, ast.Attribute) and node.attr == _IN_PLACE)
