"""Reads the statements that compute attention segment by segment.

    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    splits = [torch.split(tensor, lengths.tolist(), dim=2) for tensor in (query, key, value)]
    ...       # calls of an attention function for the segments of ``zip(*splits)``
    output = torch.cat(..., dim=1)

The calls are in a comprehension or in a loop, and what they return besides the output is kept or dropped.
transformers' fused attention returns None there, so a kernel that replaces only that function knows it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.expressions import compared_with_none
from veomni_hook.patches.code.scope import loaded
from veomni_hook.patches.code.statement_runs import Run
from veomni_hook.patches.code.statements import blocks
from veomni_hook.patches.site import Missed

__all__ = ["Segments", "read"]

_SEGMENTS = 3  # query, key and value


@dataclass
class Segments:
    """The statements that compute attention by segment, and what they compute it from.

    Attributes:
        run: from the lengths to the last statement of their block.
        cu_seqlens: the name of the boundaries.
        tensors: the names of query, key and value.
        call: the call of the attention function for one segment.
        output: the name of the result.
        answer: statements that assign everything else that the run assigns, if the attention function returns
            no weights.
    """

    run: Run
    cu_seqlens: str
    tensors: tuple[str, ...]
    call: ast.Call | None = None
    output: str = ""
    answer: list[ast.stmt] = field(default_factory=list)
    #: Names of lists: of outputs, of weights (all None), of pairs of both.
    _outputs: str = ""
    _weights: str = ""
    _pairs: str = ""
    _splits: str = ""

    def follow(self, statement: ast.stmt) -> None:
        """Take a statement after the splits into account.

        Raises:
            Missed: it is none of those that are known.
        """
        if isinstance(statement, ast.For):
            self._loop(statement)
        elif isinstance(statement, ast.If):
            if not self._tests_weights(statement.test, ast.IsNot) or statement.orelse:
                raise Missed("a condition other than whether there are weights", statement)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement, statement.targets[0], statement.value)
        else:
            raise Missed("it does more with the segments than to call an attention function", statement)

    def _assign(self, statement: ast.Assign, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and _is_empty_lists(value, len(target.elts)):
            return  # the lists of the loop that follows
        if not isinstance(target, ast.Name):
            raise Missed("a result is not assigned to a name", statement)
        joined = _joined(value)
        if joined is not None:
            if not self._is_outputs(joined):
                raise Missed("what is joined is not the output of the segments", statement)
            self.output = target.id
        elif isinstance(value, ast.ListComp) and self._over_segments(value):
            self._called(value.elt, _names(value.generators[0].target), statement)
            self._outputs, self._pairs = (target.id, "") if _first_of(value.elt) else ("", target.id)
        elif _is_none(value) or (
            isinstance(value, ast.IfExp) and _is_none(value.body) and self._tests_weights(value.test, ast.Is)
        ):
            self.answer.append(ast.parse(f"{target.id} = None").body[0])
            self._weights = "" if self._weights == target.id else self._weights
        else:
            raise Missed("it does more with the segments than to call an attention function", statement)

    def _loop(self, loop: ast.For) -> None:
        """``for q, k, v in zip(*splits): output, weight = call; outputs.append(output); ...``."""
        names = _names(loop.target)
        first, *rest = loop.body
        returned = _names(first.targets[0]) if isinstance(first, ast.Assign) else ()
        if loop.orelse or not self._is_zip(loop.iter) or len(returned) != 2:
            raise Missed("the loop over the segments has another form", loop)
        assert isinstance(first, ast.Assign)  # noqa: S101
        self._called(first.value, names, first)
        kept = dict(filter(None, map(_appended, rest)))
        if len(kept) != len(rest) or not kept.keys() <= set(returned) or returned[0] not in kept:
            raise Missed("the loop over the segments does more than to keep what a call returns", loop)
        self._outputs = kept[returned[0]]
        self._weights = kept.get(returned[1], "")

    def _over_segments(self, node: ast.ListComp) -> bool:
        """Whether a comprehension is over ``zip(*splits)`` alone; its call is checked apart."""
        if len(node.generators) != 1:
            return False
        generator = node.generators[0]
        return not generator.ifs and self._is_zip(generator.iter)

    def _is_zip(self, node: ast.expr) -> bool:
        return ast.unparse(node) == f"zip(*{self._splits})"

    def _called(self, element: ast.expr, names: Sequence[str], at: ast.AST) -> None:
        """Note the call for a segment, whose query, key and value are ``names``."""
        call = _first_of(element) or element
        if self.call is not None or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise Missed("more than one call, or none, for a segment", at)
        if [ast.unparse(each) for each in call.args] != ["self", *names] or len(names) != _SEGMENTS:
            raise Missed("the call for a segment is not attention(self, query, key, value, ...)", at)
        if not set(names).isdisjoint(loaded([each.value for each in call.keywords])):
            raise Missed("an argument of the call depends on the segment", at)
        self.call = call

    def _is_outputs(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id == self._outputs
        if not isinstance(node, ast.ListComp) or len(node.generators) != 1 or node.generators[0].ifs:
            return False
        generator = node.generators[0]
        if self._is_zip(generator.iter):
            self._called(node.elt, _names(generator.target), node)
            return _first_of(node.elt) is not None
        first = _first_of(node.elt)
        return (
            bool(self._pairs)
            and ast.unparse(generator.iter) == self._pairs
            and first is not None
            and ast.unparse(first) == ast.unparse(generator.target)
        )

    def _tests_weights(self, test: ast.expr, operator: type[ast.cmpop]) -> bool:
        """``weights[0] is None``, or the same of pairs: ``outputs[0][1] is None``."""
        wanted = [f"{self._weights}[0]"] if self._weights else []
        wanted += [f"{self._pairs}[0][1]"] if self._pairs else []
        asked = compared_with_none(test, operator)
        return asked is not None and ast.unparse(asked) in wanted

    def finish(self) -> None:
        """Check that the run is complete; the weights' list has a None for each segment.

        Raises:
            Missed: it is not.
        """
        if self.call is None or not self.output:
            raise Missed("the outputs of the segments are not joined", self.run.statements[0])
        if self._weights:
            text = f"{self._weights} = [None] * (len({self.cu_seqlens}) - 1)"
            self.answer.insert(0, ast.parse(text).body[0])


def read(function: FunctionNode) -> Segments | None:
    """The segments that a method computes attention for; None if it splits nothing.

    Raises:
        Missed: it splits tensors at boundaries, but goes on in an unknown way.
    """
    for block in blocks(function):
        for index, statement in enumerate(block[:-1]):
            lengths, boundaries = _lengths(statement)
            if not lengths:
                continue
            splits, tensors = _splits(block[index + 1], lengths)
            if not splits:
                raise Missed("the lengths do not split query, key and value", statement)
            found = Segments(Run(function, block, index, len(block) - 1), boundaries, tensors, _splits=splits)
            for each in block[index + 2 :]:
                found.follow(each)
            found.finish()
            return found
    return None


def _lengths(statement: ast.stmt) -> tuple[str, str]:
    """The names in ``lengths = boundaries[1:] - boundaries[:-1]``, or empty ones."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(lengths)],
            value=ast.BinOp(left=ast.Subscript(value=ast.Name(boundaries)), op=ast.Sub()) as difference,
        ) if ast.unparse(difference) == f"{boundaries}[1:] - {boundaries}[:-1]":
            return lengths, boundaries
    return "", ""


def _splits(statement: ast.stmt, lengths: str) -> tuple[str, tuple[str, ...]]:
    """The names in ``splits = [torch.split(t, lengths.tolist(), dim=2) for t in (q, k, v)]``."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(splits)],
            value=ast.ListComp(
                elt=split, generators=[ast.comprehension(target=ast.Name(each), iter=iterated, ifs=[])]
            ),
        ):
            tensors = _names(iterated)
            wanted = f"torch.split({each}, {lengths}.tolist(), dim=2)"
            if len(tensors) == _SEGMENTS and ast.unparse(split) == wanted:
                return splits, tensors
    return "", ()


def _names(node: ast.AST) -> tuple[str, ...]:
    """The names in a tuple or a list of nothing but names."""
    if not isinstance(node, (ast.Tuple, ast.List)):
        return ()
    names = [each.id for each in node.elts if isinstance(each, ast.Name)]
    return tuple(names) if len(names) == len(node.elts) else ()


def _first_of(node: ast.expr) -> ast.expr | None:
    """``x`` of ``x[0]``."""
    match node:
        case ast.Subscript(value=value, slice=ast.Constant(value=0)):
            return value
    return None


def _joined(node: ast.expr) -> ast.expr | None:
    """``x`` of ``torch.cat(x, dim=1)``."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name("torch"), attr="cat"),
            args=[parts],
            keywords=[ast.keyword(arg="dim", value=ast.Constant(value=1))],
        ):
            return parts
    return None


def _appended(statement: ast.stmt) -> tuple[str, str] | None:
    """The names in ``kept.append(value)``: the value's, then the list's."""
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(kept), attr="append"), args=[ast.Name(value)], keywords=[]
            )
        ):
            return value, kept
    return None


def _is_empty_lists(node: ast.expr, count: int) -> bool:
    return (
        isinstance(node, ast.Tuple)
        and len(node.elts) == count
        and all(isinstance(each, ast.List) and not each.elts for each in node.elts)
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
