"""The loop over experts in normal form: who goes where, and what one expert does with its rows.

Upstream writes it in many ways, all of which say: for every expert that somebody chose, take the rows of its
tokens, compute, multiply by their routing weights, add to the result. `read_loop` checks that the statements
around the computation say that, and gives the computation as a straight-line function of the rows, their
weights and one expert's parameters, ready for `veomni_hook.patches.graph`.

Not told apart: whether the mask has a row for the id past the last expert, and whether the loop skips it.
Where either would make a difference, upstream raises.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from veomni_hook.patches.graph import Scope
from veomni_hook.patches.text.document import FunctionNode, has_docstring

__all__ = ["EXPERT", "ROUTING", "STATES", "Computation", "Loop", "OtherLoop", "read_loop", "statements_text"]

# Names of the normal form, which upstream does not use.
#: The rows of an expert's tokens [rows, hidden], their routing weights [rows, 1], the expert's number.
STATES, ROUTING, EXPERT = "expert_states__", "expert_routing__", "expert_number__"
_TOKEN, _PLACE, _RESULT = "expert_token__", "expert_place__", "expert_result__"
_STACKED = "expert_parameter{}__"

_RESULT_BEGINS = re.compile(
    r"torch\.zeros_like\((?P<hidden>\w+)(, dtype=(?P<dtype>[\w.]+))?(, device=(?P=hidden)\.device)?\)"
)
_HITS = re.compile(
    r"torch\.greater\((?P<mask>.+)\.sum\(dim=\(-1, -2\)\), 0\)"
    r"\.nonzero\((as_tuple=False)?\)(\.squeeze\(-1\))?"
)
_MASK = re.compile(
    r"(torch\.nn\.functional\.one_hot\((?P<ids>\w+), num_classes=(?P<count>.+)\)|(?P<mask>\w+))"
    r"\.permute\(2, 1, 0\)"
)
_ROUTED = re.compile(rf"(?P<weights>\w+)\[{_TOKEN}, {_PLACE}, None\]")
_SHARE = re.compile(rf"(?P<held>self(\.\w+)*)\[({EXPERT}|f'\w*{{{EXPERT}}}')\]")


class OtherLoop(Exception):
    """The function is no such loop; the message says where it differs."""

    def __init__(self, reason: str, node: ast.AST) -> None:
        super().__init__(f"{reason} (line {getattr(node, 'lineno', 0)})")


@dataclass(frozen=True, slots=True)
class Computation:
    """What one expert does.

    Attributes:
        function: ``(self, STATES, ROUTING, <an expert's parameters>)``, straight-line.
        stacked: name of each expert's parameter to the source of what holds all of them.
        test: when the loop takes this way, source text with ``EXPERT``; empty: always, or otherwise.
    """

    function: ast.FunctionDef
    stacked: dict[str, str]
    test: str


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over experts.

    Attributes:
        hidden: forward's parameter for the hidden states.
        index: that for the chosen ids, or for the mask.
        weights: that for the routing weights.
        dtype: what the results are added up in: ``hidden``, ``weights`` (their dtypes) or ``float32``.
        count: number of the mask's rows as source text, one more where the sentinel has a row. Empty where
            ``index`` is the mask.
        computations: one, or two where the loop chooses by the expert's number.
    """

    hidden: str
    index: str
    weights: str
    dtype: str
    count: str
    computations: tuple[Computation, ...]


def read_loop(function: FunctionNode, scope: Scope) -> Loop:
    """The normal form of a ``forward``.

    Raises:
        OtherLoop: it is something else.
    """
    body = function.body[1:] if has_docstring(function) else function.body
    loops = [statement for statement in body if isinstance(statement, ast.For)]
    if len(loops) != 1 or loops[0].orelse or not isinstance(loops[0].target, ast.Name):
        raise OtherLoop("no loop over experts", function)
    at = body.index(loops[0])
    reader = _Reader(function, scope)
    for statement, detached in reader.flat(body[:at]):
        reader.before(statement, detached=detached)
    reader.loop(loops[0])
    computations = tuple(reader.computations(loops[0]))
    reader.after(body[at + 1 :], loops[0])
    if not reader.weights or reader.empty not in ("", reader.hidden, reader.index, reader.weights):
        raise OtherLoop("no routing weights, or another branch", loops[0])
    return Loop(reader.hidden, reader.index, reader.weights, reader.dtype, reader.count, computations)


def statements_text(function: FunctionNode, scope: Scope) -> str:
    """The body of a function as normalised source text, torch's functions under their full names."""
    body = function.body[1:] if has_docstring(function) else function.body
    return "\n".join(ast.unparse(_Dotted(scope).visit(_copied(statement))) for statement in body)


@dataclass(slots=True)
class _Reader:
    function: FunctionNode
    scope: Scope
    #: Local names to what they stand for, in parameters, attributes and names of the normal form.
    values: dict[str, ast.expr] = field(default_factory=dict)
    #: Those of them that carry no gradient.
    detached: set[str] = field(default_factory=set)
    hidden: str = ""
    index: str = ""
    weights: str = ""
    dtype: str = ""
    count: str = ""
    mask: str = ""
    #: The parameter for which, if it is empty, the result is returned at once, as the loop would.
    empty: str = ""

    def flat(
        self, statements: Iterable[ast.stmt], *, detached: bool = False
    ) -> Iterator[tuple[ast.stmt, bool]]:
        """The statements, and those under ``torch.no_grad()`` with True."""
        for statement in statements:
            if not isinstance(statement, ast.With):
                yield statement, detached
            elif [self.text(item) for item in statement.items] == ["torch.no_grad()"]:
                yield from self.flat(statement.body, detached=True)
            else:
                raise OtherLoop("another with statement", statement)

    def before(self, statement: ast.stmt, *, detached: bool) -> None:
        """Take in a statement in front of the loop."""
        if isinstance(statement, ast.If):
            empty = re.fullmatch(rf"if (\w+)\.numel\(\) == 0:\n    return {_RESULT}", self.text(statement))
            if empty is None:
                raise OtherLoop("another branch", statement)
            self.empty = empty[1]
            return
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(statement, ast.Assign) or not isinstance(target, ast.Name) or statement.targets[1:]:
            raise OtherLoop("a statement that is no assignment to one name", statement)
        begins = _RESULT_BEGINS.fullmatch(self.text(statement.value))
        if begins is None:
            self.bind(target.id, self.full(statement.value), detached=detached)
            return
        self.hidden = self.parameter(begins["hidden"], statement)
        self.dtype = self._result_dtype(begins["dtype"], statement)
        self.bind(target.id, ast.Name(_RESULT, ast.Load()))

    def loop(self, loop: ast.For) -> None:
        """Check that the loop runs over the experts with tokens."""
        hits = _HITS.fullmatch(self.text(loop.iter))
        mask = _MASK.fullmatch(hits["mask"]) if hits else None
        if hits is None or mask is None or not self.hidden:
            raise OtherLoop("it does not run over the experts with tokens", loop)
        self.index = self.parameter(mask["ids"] or mask["mask"], loop)
        self.count, self.mask = mask["count"] or "", hits["mask"]
        self.bind(loop.target.id, ast.Name(EXPERT, ast.Load()))  # type: ignore[attr-defined]

    def computations(self, loop: ast.For) -> Iterator[Computation]:
        """What an expert computes, each way that the loop can take."""
        *steps, (last, detached) = self.flat(loop.body)
        ways: list[tuple[str, list[ast.stmt]]] = [("", [])]
        for statement, without_gradient in steps:
            if self._is_routing(statement):
                continue
            if without_gradient:
                raise OtherLoop("a computation without gradient", statement)
            if isinstance(statement, ast.If) and statement.orelse and len(ways) == 1:
                common, test = ways[0][1], self.text(statement.test)
                ways = [(test, [*common, *statement.body]), ("", [*common, *statement.orelse])]
                continue
            if isinstance(statement, ast.If):
                raise OtherLoop("a condition that leaves something out", statement)
            for _, way in ways:
                way.append(statement)
        added = self._added(last)
        if added is None or detached:
            raise OtherLoop("it does not end with adding to the result", last)
        for test, way in ways:
            yield self._computation(way, added, test)

    def after(self, statements: list[ast.stmt], loop: ast.For) -> None:
        """Check what is returned: the result, in the dtype of the hidden states."""
        text = self.text(statements[0]) if len(statements) == 1 else ""
        plain = text == f"return {_RESULT}" and self.dtype == "hidden"
        if not plain and text != f"return {_RESULT}.to({self.hidden}.dtype)":
            raise OtherLoop("it returns something else", statements[0] if statements else loop)

    def full(self, node: ast.AST) -> ast.expr:
        """A copy in terms of parameters, attributes and names of the normal form."""
        return _Full(self).visit(_copied(node))  # type: ignore[no-any-return]

    def text(self, node: ast.AST) -> str:
        """The same as source text, functions under their full names."""
        return ast.unparse(_Dotted(self.scope).visit(self.full(node)))

    def bind(self, name: str, value: ast.expr, *, detached: bool = False) -> None:
        """Let a local name stand for a value."""
        self.values[name] = value
        if detached:
            self.detached.add(name)

    def parameter(self, name: str, node: ast.AST) -> str:
        """``name``, if it is a parameter of the function."""
        if name not in [argument.arg for argument in self.function.args.args[1:]]:
            raise OtherLoop(f"{name} is no parameter", node)
        return name

    def _result_dtype(self, text: str | None, node: ast.AST) -> str:
        if text in (None, f"{self.hidden}.dtype"):
            return "hidden"
        if text == "torch.float32":
            return text.removeprefix("torch.")
        name, _, attribute = str(text).partition(".")
        if attribute != "dtype":
            raise OtherLoop("the result has another dtype", node)
        self.weights = self.parameter(name, node)
        return "weights"

    def _is_routing(self, statement: ast.stmt) -> bool:
        """Take in a statement that computes nothing: it names the expert or its tokens, or skips nobody."""
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], self.text(statement.value)
            if isinstance(target, ast.Name) and value == EXPERT:
                self.bind(target.id, ast.Name(EXPERT, ast.Load()))
                return True
            if value in (f"torch.where({self.mask}[{EXPERT}]{end})" for end in ("", ".squeeze(0)")):
                names = [each.id for each in getattr(target, "elts", []) if isinstance(each, ast.Name)]
                if len(names) != 2:
                    raise OtherLoop("an expert's tokens have other names", statement)
                for name, role in zip(names, (_PLACE, _TOKEN), strict=True):
                    self.bind(name, ast.Name(role, ast.Load()))
                return True
        # Of a mask with E rows id E has none, of one with E + 1 rows it is the last.
        last = self.count.removesuffix(" + 1")
        skipped = [f"if {test}:\n    continue" for test in (f"{EXPERT} == {last}", f"{_TOKEN}.numel() == 0")]
        return self.text(statement) in skipped

    def _added(self, statement: ast.stmt) -> ast.expr | None:
        """What is added to the result, without a cast to its dtype."""
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or len(call.args) != 3 or call.keywords:
            return None
        if [self.text(each) for each in (call.func, *call.args[:2])] != [
            f"{_RESULT}.index_add_",
            "0",
            _TOKEN,
        ]:
            return None
        added = call.args[2]
        casts = [f".to({_RESULT}.dtype)"] + [f".to({self.hidden}.dtype)"] * (self.dtype == "hidden")
        if isinstance(added, ast.Call) and self.text(added).endswith(tuple(casts)):
            return added.func.value  # type: ignore[attr-defined, no-any-return]
        return added

    def _computation(self, way: list[ast.stmt], added: ast.expr, test: str) -> Computation:
        for statement in way:
            self._check_step(statement)
        stacked: dict[str, str] = {}
        rows = _Full(self, stacked)
        body = [rows.visit(_copied(statement)) for statement in way]
        body.append(ast.copy_location(ast.Return(rows.visit(_copied(added))), added))
        left = {node.id for each in body for node in ast.walk(each) if isinstance(node, ast.Name)}
        if left & {_RESULT, _TOKEN, _PLACE, EXPERT, self.hidden, self.index, self.weights}:
            raise OtherLoop("the computation uses more than its rows", way[0] if way else added)
        names = ["self", STATES, ROUTING, *stacked]
        arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
        function = ast.FunctionDef("expert", arguments, body, [], lineno=added.lineno, col_offset=0)
        return Computation(ast.fix_missing_locations(function), stacked, test)

    def _check_step(self, statement: ast.stmt) -> None:
        """A step of the computation binds names of its own, which the next expert does not see."""
        if not isinstance(statement, ast.Assign):
            raise OtherLoop("a statement that is no assignment", statement)
        taken = {*self.values, *(argument.arg for argument in self.function.args.args)}
        for node in (node for target in statement.targets for node in ast.walk(target)):
            if isinstance(node, ast.Name) and node.id in taken:
                raise OtherLoop(f"it changes {node.id}", statement)
            if not isinstance(node, ast.Name | ast.Tuple | ast.expr_context):
                raise OtherLoop("it writes into something", statement)


def _copied(node: Any) -> Any:
    # Five times as fast as copy.deepcopy.
    if isinstance(node, list):
        return [_copied(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    return ast.copy_location(
        type(node)(**{name: _copied(value) for name, value in ast.iter_fields(node)}), node
    )


class _Full(ast.NodeTransformer):
    """Puts values in place of locals, and names of the normal form where the code means these.

    An expert's share of what is stacked becomes a parameter, noted in ``stacked``, where that is given.
    """

    def __init__(self, reader: _Reader, stacked: dict[str, str] | None = None) -> None:
        self.reader = reader
        self.stacked = stacked

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value = self.reader.values.get(node.id) if isinstance(node.ctx, ast.Load) else None
        if value is None:
            return node
        if self.stacked is not None and node.id in self.reader.detached:
            raise OtherLoop(f"{node.id} carries no gradient", node)
        full = ast.copy_location(_copied(value), node)
        return self.visit_Attribute(full) if isinstance(full, ast.Attribute) else full

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if self.stacked is not None and ast.unparse(node) == f"{self.reader.hidden}.dtype":
            node.value = ast.Name(STATES, ast.Load())
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        text = ast.unparse(node)
        if text in (f"{EXPERT}.item()", f"int({EXPERT})"):
            return ast.Name(EXPERT, ast.Load())
        hidden = self.reader.hidden
        if text == f"{hidden}[None, {_TOKEN}].reshape(-1, {hidden}.shape[-1])":
            return ast.Name(STATES, ast.Load())
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        text = ast.unparse(node)
        if text == f"{EXPERT}[0]":
            return ast.Name(EXPERT, ast.Load())
        if text == f"{self.reader.hidden}[{_TOKEN}]":
            return ast.Name(STATES, ast.Load())
        routed, share = _ROUTED.fullmatch(text), _SHARE.fullmatch(text)
        if routed is not None and routed["weights"] == (self.reader.weights or routed["weights"]):
            self.reader.weights = self.reader.parameter(routed["weights"], node)
            return ast.Name(ROUTING, ast.Load())
        if share is None or self.stacked is None:
            return node
        known = {source: name for name, source in self.stacked.items()}
        name = known.get(share["held"], _STACKED.format(len(known)))
        self.stacked[name] = share["held"]
        return ast.copy_location(ast.Name(name, ast.Load()), node)


class _Dotted(ast.NodeTransformer):
    """Writes what a module's names mean."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        full = self.scope.dotted(node)
        if full and not full.startswith(":"):
            return ast.Name(full, ast.Load())
        return self.generic_visit(node)
