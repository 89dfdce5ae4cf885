"""Which names of a function follow from lengths alone: what binds them, and what an expression needs.

Everything that binds or changes a name counts, in all branches. A name follows from lengths if every such
value computes with lengths, numbers of the configuration and constants; one that does not is enough to leave
the name alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import COMPREHENSIONS, last_name, own_attribute, walk_ast
from veomni_hook.patches.idioms.host_metadata.sounds import LENGTHS

__all__ = ["LIBRARIES", "NUMBERS", "Names", "device_of", "names_of", "without_devices"]

#: What gives the host a number or a list.
NUMBERS = {"tolist", "item", "len", "range", "enumerate", "int", "min", "max", "sum"}
_BUILT_IN = {"len", "range", "enumerate", "int"}
#: What expressions may call that compute with lengths alone.
LIBRARIES = {"torch", "F", "nn"}
#: Functions and methods that compute a result from their arguments, and nothing else.
_COMPUTE = {
    *NUMBERS, LENGTHS, "full", "zeros", "ones", "arange", "tensor", "ceil", "floor", "where", "cat", "stack",
    "diff", "cumsum", "pad", "pad_sequence", "repeat_interleave", "unique_consecutive", "clamp", "long",
    "bool", "to", "unsqueeze", "squeeze", "flatten", "any", "all", "new_ones", "repeat",
}  # fmt: skip
_FORMS = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Slice, ast.Tuple, ast.List,
    ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
    ast.expr_context,
)  # fmt: skip
#: Statements whose bindings are not followed.
_UNKNOWN = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Global, ast.Nonlocal,
            ast.Delete, ast.With, ast.Try, ast.Match, ast.NamedExpr, ast.Import, ast.ImportFrom)  # fmt: skip


@dataclass
class Names:
    """What is known of the names of a function.

    Attributes:
        carried: tensors on the device whose values the host knows.
        hosted: what the host computes from these.
        plain: constants and lists of them.
        steps: those of ``hosted`` that are elements of what a loop goes through, so numbers.
        sources: by name, what binds or changes it.
        whole: by name, the only assignment that binds it, if nothing else changes it.
    """

    carried: set[str]
    is_number: Callable[[str], bool]
    hosted: set[str] = field(default_factory=set)
    plain: set[str] = field(default_factory=set)
    steps: set[str] = field(default_factory=set)
    sources: dict[str, list[ast.expr | None]] = field(default_factory=dict)
    whole: dict[str, ast.Assign] = field(default_factory=dict)

    def follows(self, node: ast.AST) -> bool:
        """Whether an expression computes with lengths, numbers and constants alone."""
        return self._computes(node) and (self.uses(node) or not _calls(node))

    def uses(self, node: ast.AST) -> bool:
        """Whether an expression computes with a length; where it puts the result is not asked."""
        known = self.carried | self.hosted
        return any(isinstance(each, ast.Name) and each.id in known for each in without_devices(node))

    def _computes(self, node: ast.AST) -> bool:
        match node:
            case ast.Constant(value=value):
                # A text may be the name of a device.
                return not isinstance(value, str)
            case ast.Name(id=name):
                return name in self.carried | self.hosted | self.plain | LIBRARIES
            case ast.Attribute(value=value):
                own = own_attribute(node)
                return self.is_number(own) if own else self._computes(value)
            case ast.Call(func=function, args=args, keywords=keywords):
                called = isinstance(function, ast.Name) and function.id in _BUILT_IN | {LENGTHS}
                if last_name(function) not in _COMPUTE or not (called or self._called(function)):
                    return False
                return all(map(self._computes, args)) and all(
                    device_of(each.value) != ""
                    if each.arg == "device"
                    else each.arg is not None and self._computes(each.value)
                    for each in keywords
                )
        return isinstance(node, _FORMS) and all(map(self._computes, ast.iter_child_nodes(node)))

    def _called(self, function: ast.expr) -> bool:
        return isinstance(function, ast.Attribute) and self._computes(function.value)


def names_of(
    function: FunctionNode,
    carried: set[str],
    sent: set[str],
    is_number: Callable[[str], bool],
    results: Callable[[ast.expr], set[int]],
) -> Names | None:
    """Find what follows from the tensors ``carried``; None if the function binds names in other ways.

    Args:
        function: the function.
        carried: its arguments that are lengths.
        sent: names of what the host computes and sends to the device at once.
        is_number: whether an attribute of ``self`` is a number of the configuration.
        results: which elements of the result of a call are tensors whose values the host knows.
    """
    if any(isinstance(node, _UNKNOWN) for statement in function.body for node in walk_ast(statement)):
        return None
    names = Names(set(carried), is_number)
    given = parameter_names(function)
    known, others, changed, renamed = set[str](), set[str](), set[str](), set[str]()
    for name, source, statement in _bindings(function, results):
        if source is _RESULT:
            known.add(name)
            continue
        names.sources.setdefault(name, []).append(source)
        if isinstance(statement, ast.Assign):
            names.whole[name] = statement
        (names.steps if isinstance(statement, ast.For | ast.comprehension) else others).add(name)
        if isinstance(statement, ast.Subscript | ast.Expr):
            changed.add(name)
        elif isinstance(source, ast.Name | ast.Subscript | ast.Attribute):
            # It may be the same tensor, or a part of it.
            renamed.add(name)
    bound = set(names.sources)
    names.whole = {name: found for name, found in names.whole.items() if len(names.sources[name]) == 1}
    names.steps -= others
    # A name that is bound in two ways is not known.
    names.carried = (names.carried - (given & bound)) | (known - bound - given) | sent
    left = {name for name in bound & given if not _bound_first(function, name)} | (changed & renamed)
    names.hosted = bound - names.carried - known - left - LIBRARIES - _BUILT_IN
    _remove_unknown(names)
    return names


#: Stands for an element of a result whose values the host knows.
_RESULT = ast.Constant("result")


def _remove_unknown(names: Names) -> None:
    """Leave in ``hosted`` and ``plain`` what follows from lengths, and from constants alone."""
    while True:
        derived = _derived(names)
        names.plain |= names.hosted - derived
        names.hosted &= derived
        left = {
            name
            for name in names.hosted | names.plain
            if all(source is not None and names.follows(source) for source in names.sources[name])
        }
        if left == names.hosted | names.plain:
            return
        names.hosted, names.plain = left, set()


def _derived(names: Names) -> set[str]:
    """The names that a length takes part in."""
    derived: set[str] = set()
    while True:
        known = Names(names.carried, names.is_number, derived)
        found = {
            name
            for name in names.hosted | names.plain
            if any(source is not None and known.uses(source) for source in names.sources[name])
        }
        if found == derived:
            return derived
        derived = found


def _bindings(
    function: FunctionNode, results: Callable[[ast.expr], set[int]]
) -> Iterator[tuple[str, ast.expr | None, ast.AST]]:
    """Every name with a value that binds or changes it, None for an unknown one; and the statement."""
    for statement in function.body:
        for node in walk_ast(statement):
            known = results(node.value) if isinstance(node, ast.Assign) else set()
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and known:
                for at, part in enumerate(node.targets[0].elts):
                    yield from _bound(part, _RESULT if at in known else None, node)
            else:
                yield from _bound_by(node)


def _bound_by(node: ast.AST) -> Iterator[tuple[str, ast.expr | None, ast.AST]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                alone = isinstance(target, ast.Name) and len(targets) == 1
                yield from _bound(target, value, node if alone else target)
        case ast.AugAssign(target=target, value=value) | ast.AnnAssign(target=target, value=value):
            yield from _bound(target, value, target)
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield from _bound(target, value, node)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=args, keywords=more)):
            for each in (*args, *(keyword.value for keyword in more)):
                yield name, each, node


def _bound(
    target: ast.expr, value: ast.expr | None, node: ast.AST
) -> Iterator[tuple[str, ast.expr | None, ast.AST]]:
    match target:
        case ast.Name(id=name):
            yield name, value, node
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _bound(part, value, node)
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            yield name, value, target
            yield name, index, target
        case ast.Starred(value=inner):
            yield from _bound(inner, None, node)


def _bound_first(function: FunctionNode, name: str) -> bool:
    """Whether a function assigns an argument before it uses it, in a statement of its own."""
    for statement in function.body:
        used = [each for each in walk_ast(statement) if isinstance(each, ast.Name) and each.id == name]
        if used:
            return isinstance(statement, ast.Assign) and used == [statement.targets[0]]
    return False


def device_of(node: ast.expr) -> str:
    """``x`` of ``x.device``; empty for other code."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr="device"):
            return name
    return ""


def without_devices(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of an expression without those that say on which device a result is."""
    devices = {
        id(inner)
        for each in walk_ast(node)
        if isinstance(each, ast.keyword) and each.arg == "device"
        for inner in walk_ast(each)
    }
    return (each for each in walk_ast(node) if id(each) not in devices)


def _calls(node: ast.AST) -> bool:
    return any(isinstance(each, (ast.Call, *COMPREHENSIONS)) for each in walk_ast(node))
