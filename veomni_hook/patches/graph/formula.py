"""The domain of formulas: a value is a node of an expression graph, which says how it is computed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.graph import normal_forms
from veomni_hook.patches.graph.calls import Trace, call, elements
from veomni_hook.patches.graph.changes import loop, write
from veomni_hook.patches.graph.nodes import UNBOUND, Node, constant
from veomni_hook.patches.graph.operations import DTYPES, dtype_of, is_number
from veomni_hook.patches.graph.scope import Scope
from veomni_hook.patches.interpreter.domain import Domain, Frame, UnclearError
from veomni_hook.patches.interpreter.walk import conditional, evaluate, may_leave, run

__all__ = ["Formula"]

_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.MatMult: "matmul",
    ast.BitAnd: "bitand",
    ast.BitOr: "bitor",
    ast.BitXor: "bitxor",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
}
_COMPARE = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Is: "is",
    ast.IsNot: "is",
    ast.In: "in",
    ast.NotIn: "in",
}
# Twice the depth found in practice; several functions recurse from a node to its leaves.
_MOST_DEPTH = 150
# Values that are never None.
_NEVER_NONE = frozenset(
    "add sub mul div cast square rsqrt sqrt neg tuple shape size dtype slice unsqueeze cat stack "
    "mean silu".split()
)
# Contexts that only change how the code in them computes.
_CONTEXTS = (
    "torch.no_grad",
    "torch.enable_grad",
    "torch.inference_mode",
    "torch.set_grad_enabled",
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
)
# Operations with integer or boolean results.
_DISCRETE = ("one_hot", "nonzero", "eq", "lt", "le", "ne", "argmax", "size", "constant")
_RAISED = Node("raise")


class Formula(Domain[Node]):
    """Values are nodes.

    Args:
        scope: the module's names.

    Attributes:
        trace: the calls of unknown code so far.
    """

    unbound = UNBOUND

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self.trace = Trace(scope)

    def step(self, node: ast.AST, value: Node | None = None) -> None:
        super().step(node)
        if value is not None and value.depth > _MOST_DEPTH:
            raise UnclearError("the function is nested too deeply to be followed", node)

    def constant(self, value: object, node: ast.expr | None = None) -> Node:
        return constant(value, node)

    def free(self, node: ast.Name, frame: Frame[Node]) -> Node:
        if node.id in frame.local:
            raise UnclearError(f"{node.id} may not be bound here", node)
        path = self.trace.scope.resolve(node.id)
        return Node("global", (), DTYPES.get(path, path), node)

    def attribute(self, value: Node, node: ast.Attribute, frame: Frame[Node]) -> Node:
        name = node.attr
        result = None
        if value.op == "global" and value.value not in DTYPES.values():
            path = f"{value.value}.{name}"
            result = Node("global", (), DTYPES.get(path, path), node)
        elif value.op == "record" and isinstance(value.value, tuple):
            result = constant(dict(value.value)[name])
        elif value.op == "self":
            result = frame.values.get(f"self.{name}") or Node("attribute", (), name, node)
        elif name == "dtype":
            result = dtype_of(value)
        elif name == "shape":
            result = normal_forms.shape(value, node)
        elif name in ("ndim", "device"):
            result = Node(name, (value,), None, node)
        elif value.op == "attribute":
            result = Node("attribute", (), f"{value.value}.{name}", node)
        return result if result is not None else Node("getattr", (value,), name, node)

    def call(self, node: ast.Call, frame: Frame[Node]) -> Node:
        return call(node, frame, self.trace)

    def binary(self, operator: ast.operator, left: Node, right: Node, node: ast.expr | None) -> Node:
        if isinstance(operator, ast.Pow):
            return normal_forms.power(left, right, node)
        op = _BINARY[type(operator)]
        if op in ("add", "mul") and (_is_sequence(left) or _is_sequence(right)):
            return _joined(op, left, right, node)
        if op in ("add", "sub", "mul", "div"):
            return normal_forms.binary(op, left, right, node)
        return Node(op, (left, right), None, node)

    def unary(self, value: Node, node: ast.UnaryOp) -> Node:
        if isinstance(node.op, ast.USub):
            return normal_forms.negative(value, node)
        if isinstance(node.op, ast.Not):
            return value.args[0] if value.op == "not" else Node("not", (value,), None, node)
        return Node("logical_invert" if isinstance(node.op, ast.Invert) else "plus", (value,), None, node)

    def compare(self, values: Sequence[Node], node: ast.Compare) -> Node:
        results = []
        for operator, left, right in zip(node.ops, values, values[1:], strict=False):
            op = _COMPARE[type(operator)]
            if op != "is" or right != normal_forms.NONE:
                result = normal_forms.compare(op, left, right, node)
            elif left.op in _NEVER_NONE or left.op == "constant":
                result = constant(left == normal_forms.NONE, node)
            else:
                result = Node("is", (left, right), None, node)
            if isinstance(operator, ast.IsNot | ast.NotIn):
                known = result.op == "constant"
                result = constant(not result.value, node) if known else Node("not", (result,), None, node)
            results.append(result)
        return results[0] if len(results) == 1 else Node("and", tuple(results), None, node)

    def logic(self, node: ast.BoolOp, frame: Frame[Node]) -> Node:
        operands: list[Node] = []
        decisive = isinstance(node.op, ast.Or)
        for value in node.values:
            operand = conditional(value, frame) if operands else evaluate(value, frame)
            if operand.op == "constant":
                if bool(operand.value) is decisive:
                    operands.append(operand)
                    break
                if value is not node.values[-1]:
                    continue
            operands.append(operand)
        if len(operands) == 1:
            return operands[0]
        return Node("or" if decisive else "and", tuple(operands), None, node)

    def sequence(self, node: ast.Tuple | ast.List, frame: Frame[Node]) -> Node:
        return Node("tuple", tuple(elements(node.elts, frame)), None, node)

    def subscript(self, value: Node, node: ast.Subscript, frame: Frame[Node]) -> Node:
        single = not isinstance(node.slice, ast.Tuple)
        return normal_forms.subscript(value, _indices(node.slice, frame), single=single, origin=node)

    def other(self, node: ast.expr, frame: Frame[Node]) -> Node:
        """An expression kept as text (comprehension, lambda, f-string), with the values of its names."""
        names = set()
        for inner in walk_ast(node):
            if isinstance(inner, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
                raise UnclearError(f"{type(inner).__name__} is not followed", node)
            if (
                isinstance(inner, ast.Attribute)
                and inner.attr.endswith("_")
                and not inner.attr.endswith("__")
            ):
                raise UnclearError("something is changed in place inside an expression", node, writes=True)
            if isinstance(inner, ast.Name) and (inner.id in frame.local or inner.id in frame.values):
                names.add(inner.id)
        values = [frame.values[name] for name in sorted(names) if name in frame.values]
        # It may call unknown code, so each occurrence is a different value.
        text = Node("opaque", (), ast.dump(node))
        return self.trace.opaque((text, *values), (), node)

    # Branches, loops and contexts

    def test(self, node: ast.expr, frame: Frame[Node]) -> bool | Node:
        value = evaluate(node, frame)
        return bool(value.value) if value.op == "constant" else value

    def branch(self, test: Node, met: Node, unmet: Node, node: ast.expr | None = None) -> Node:
        return normal_forms.branch(test, met, unmet, node)

    def join(
        self, frame: Frame[Node], test: Node, sides: Sequence[Frame[Node]], results: Sequence[Node | None]
    ) -> None:
        met, unmet = sides
        frame.values = {}
        for name in dict.fromkeys((*met.values, *unmet.values)):
            value, other = met.values.get(name, UNBOUND), unmet.values.get(name, UNBOUND)
            if "unbound" not in (value.op, other.op):
                frame.values[name] = normal_forms.branch(test, value, other)
            else:
                # An attribute that may be set is no name that may not be bound.
                frame.values[name] = Node("unbound", (), name) if name.startswith("self.") else UNBOUND
        if met.effects or unmet.effects:
            one, other = (Node("effects", tuple(side.effects)) for side in sides)
            frame.effects.append(normal_forms.branch(test, one, other))

    def raised(self) -> Node:
        return _RAISED

    def loop(self, statement: ast.For, frame: Frame[Node]) -> None:
        self.trace.loops += 1
        loop(statement, frame, self.trace.loops - 1)

    def within(
        self, contexts: Iterable[ast.withitem], frame: Frame[Node], body: Sequence[ast.stmt]
    ) -> Node | None:
        """A block in contexts: what it assigns and returns is computed ``within`` them."""
        values = []
        for item in contexts:
            value = evaluate(item.context_expr, frame)
            called = value.args[0] if value.op == "call" else value
            if called.value not in _CONTEXTS or value.op != "call" or item.optional_vars is not None:
                raise UnclearError("an unknown context", item.context_expr)
            values.append(value)
        before = dict(frame.values)
        result = run(body, frame)
        if result is None and any(map(may_leave, body)):
            raise UnclearError("a block under a context is left before its end", body[0])
        for name, value in frame.values.items():
            if before.get(name) is not value:
                frame.values[name] = _within(value, values)
        return None if result is None else _within(result, values)

    # Assignments

    def augmented(self, node: ast.AugAssign, frame: Frame[Node]) -> None:
        target = node.target
        if not isinstance(target, ast.Name):
            raise UnclearError("something other than a local name is changed in place", node, writes=True)
        old = evaluate(ast.copy_location(ast.Name(target.id, ast.Load()), target), frame)
        new = self.binary(node.op, old, evaluate(node.value, frame), None)
        if is_number(old) or old.op in ("tuple", "constant", "part", "shape"):
            if old.op == "tuple":
                raise UnclearError("a sequence is changed in place", node, writes=True)
            frame.values[target.id] = new
        else:
            write(target, old, normal_forms.updated(old, new), frame)

    def store(self, target: ast.expr, value: Node, frame: Frame[Node]) -> None:
        if isinstance(target, ast.Subscript):
            old = evaluate(target.value, frame)
            new = Node("setitem", (old, Node("tuple", tuple(_indices(target.slice, frame))), value))
            write(target.value, old, new, frame)
        elif isinstance(target, ast.Attribute):
            owner = evaluate(target.value, frame)
            frame.effects.append(Node("setattr", (owner, value), target.attr))
            if owner.op != "self":
                raise UnclearError("an attribute of another object is set", target)
            frame.values[f"self.{target.attr}"] = value

    def unpacked(self, value: Node, targets: Sequence[ast.expr]) -> list[Node]:
        starred = [number for number, target in enumerate(targets) if isinstance(target, ast.Starred)]
        known = normal_forms.length(value)
        if not starred:
            if known is not None and known != len(targets):
                raise UnclearError(f"{known} values for {len(targets)} names", targets[0])
            return [normal_forms.item(value, number) for number in range(len(targets))]
        (star,) = starred
        after = star + 1 - len(targets)
        bounds = Node("bounds", (constant(star or None), constant(after or None), constant(None)))
        parts = [normal_forms.item(value, n if n < star else n - len(targets)) for n in range(len(targets))]
        parts[star] = normal_forms.subscript(value, [bounds], single=True)
        return parts

    def statement(self, node: ast.stmt, frame: Frame[Node]) -> None:
        if not isinstance(node, ast.Delete):
            raise UnclearError(f"{type(node).__name__} is not followed", node)
        for target in node.targets:
            if not isinstance(target, ast.Name):
                raise UnclearError("something other than a local name is deleted", node, writes=True)
            frame.values.pop(target.id, None)


def _is_sequence(node: Node) -> bool:
    return node.op in ("tuple", "part", "shape") or (node.op == "constant" and isinstance(node.value, str))


def _joined(op: str, left: Node, right: Node, origin: ast.expr | None) -> Node:
    """Concatenated or repeated sequences: their order counts."""
    if op == "add" and left.op in ("tuple", "part", "shape") and right.op in ("tuple", "part", "shape"):
        parts = [side.args if side.op == "tuple" else (Node("star", (side,)),) for side in (left, right)]
        return Node("tuple", (*parts[0], *parts[1]), None, origin)
    return Node(f"sequence_{op}", (left, right), None, origin)


def _indices(node: ast.expr, frame: Frame[Node]) -> list[Node]:
    """The indices of a subscript, a slice as ``bounds``."""
    if isinstance(node, ast.Tuple):
        if any(isinstance(element, ast.Starred) for element in node.elts):
            raise UnclearError("a starred index", node)
        return [_indices(element, frame)[0] for element in node.elts]
    if isinstance(node, ast.Slice):
        bounds = (node.lower, node.upper, node.step)
        return [Node("bounds", tuple(evaluate(b, frame) if b else normal_forms.NONE for b in bounds))]
    return [evaluate(node, frame)]


def _within(value: Node, contexts: Iterable[Node]) -> Node:
    for context in contexts:
        # Integers and booleans have no gradient anyway.
        source = value
        while source.op in ("permute", "transpose", "item", "slice", "unsqueeze", "reshape", "sum"):
            source = source.args[0]
        discrete = source.op in _DISCRETE or is_number(source)
        if not (discrete and "grad" in str(context.args[0].value)):
            value = Node("within", (value, context))
    return value
