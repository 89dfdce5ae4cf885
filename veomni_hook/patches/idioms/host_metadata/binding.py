"""Which names of a function follow from lengths alone: what binds them, and what an expression needs.

Everything that binds or changes a name counts, in all branches. A name follows from lengths if every such
value computes with lengths, numbers of the configuration and constants; one that does not is enough to leave
the name alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import loaded, parameter_names, read_names
from veomni_hook.patches.code.tree import COMPREHENSIONS, child_nodes, last_name, own_attribute, walk_ast
from veomni_hook.patches.upstream_names import LENGTHS

__all__ = [
    "LIBRARIES",
    "NUMBERS",
    "Binding",
    "By",
    "Names",
    "bindings",
    "device_of",
    "is_device",
    "names_of",
    "names_outside",
]

#: What gives the host a number or a list.
NUMBERS = {"tolist", "item", "len", "range", "enumerate", "int"}
#: What expressions may call that compute with lengths alone.
LIBRARIES = {"torch", "F", "nn"}
_GLOBALS = LIBRARIES | {"len", "range", "enumerate", "int", LENGTHS}
#: What computes a result from its arguments, and nothing else: functions, methods, and forms of expressions.
_CALLED = NUMBERS | {
    LENGTHS, "min", "max", "sum", "full", "zeros", "ones", "arange", "tensor", "ceil", "floor", "where",
    "cat", "stack", "diff", "cumsum", "pad", "pad_sequence", "repeat_interleave", "unique_consecutive",
    "clamp", "any", "long", "bool", "to", "unsqueeze", "squeeze", "flatten", "all", "new_ones", "repeat",
}  # fmt: skip
_FORMS = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Subscript, ast.Slice, ast.Tuple, ast.List,
    ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.Attribute, ast.Call, ast.keyword,
)  # fmt: skip
#: Statements whose bindings are not followed.
_UNKNOWN = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Global, ast.Nonlocal,
            ast.Delete, ast.With, ast.Try, ast.Match, ast.NamedExpr, ast.Import, ast.ImportFrom)  # fmt: skip


class By(Enum):
    """What gives a name a value."""

    ASSIGNMENT = auto()
    RESULT = auto()  #: an element of a result whose values the host knows
    LOOP = auto()
    CHANGE = auto()  #: of a part, or by a method


#: A name, the value that binds or changes it, None for an unknown one, and how.
Binding: TypeAlias = "tuple[str, ast.expr | None, By]"


@dataclass
class Names:
    """What is known of the names of a function.

    Attributes:
        is_number: whether an attribute of ``self`` is a number of the configuration.
        carried: tensors on the device whose values the host knows.
        sent: those that the host computes and sends to the device at once.
        hosted: what the host computes from these.
        plain: constants and lists of them.
        sources: by name, what binds or changes it.
        length: the first of the lengths that the function reads.
    """

    is_number: Callable[[str], bool]
    carried: set[str]
    sent: set[str]
    hosted: set[str] = field(default_factory=set)
    plain: set[str] = field(default_factory=set)
    sources: dict[str, list[Binding]] = field(default_factory=dict)
    length: str = ""

    def is_bound(self, name: str, by: By) -> bool:
        """Whether all that binds or changes a name does it in one way."""
        return name in self.sources and all(how is by for _, _, how in self.sources[name])

    def values(self, name: str) -> list[ast.expr]:
        """The known values that bind or change a name."""
        return [value for _, value, _ in self.sources[name] if value is not None]

    def uses(self, node: ast.AST) -> bool:
        """Whether an expression computes with a length; where it puts the result is not asked."""
        return not names_outside(node, is_device).isdisjoint(self.carried | self.hosted)

    def follows(self, node: ast.AST) -> bool:
        """Whether an expression computes with lengths, numbers and constants alone."""
        calls = any(isinstance(part, (ast.Call, *COMPREHENSIONS)) for part in walk_ast(node))
        return self._computes(node) and (self.uses(node) or not calls)

    def _computes(self, node: ast.AST) -> bool:
        match node:
            case ast.Constant(value=value):
                # A text may be the name of a device.
                return not isinstance(value, str)
            case ast.Name(id=name):
                return name in self.carried | self.hosted | self.plain | _GLOBALS
            case ast.Attribute() if own := own_attribute(node):
                return self.is_number(own)
            case ast.keyword(arg="device", value=value):
                return device_of(value) != ""
            case ast.Call(func=function) if last_name(function) not in _CALLED:
                return False
        return isinstance(node, _FORMS) and all(map(self._computes, child_nodes(node)))


def names_of(
    function: FunctionNode,
    lengths: set[str],
    sent: set[str],
    is_number: Callable[[str], bool],
    returned: Mapping[str, set[int]],
) -> Names | None:
    """Find what follows from the tensors ``lengths``; None if the function reads none, or binds otherwise.

    Args:
        function: the function.
        lengths: its arguments that are lengths.
        sent: names of what the host computes and sends to the device at once.
        is_number: whether an attribute of ``self`` is a number of the configuration.
        returned: by method, the elements of its result that are tensors whose values the host knows.
    """
    nodes = [node for statement in function.body for node in walk_ast(statement)] if lengths else []
    if any(isinstance(node, _UNKNOWN) for node in nodes):
        return None
    names = Names(is_number, lengths, sent)
    for node in nodes:
        for binding in bindings(node, returned):
            names.sources.setdefault(binding[0], []).append(binding)
    parameters, bound = parameter_names(function), names.sources.keys()
    names.length = next((name for name in loaded(function.body) if name in lengths - bound), "")
    if not names.length or not bound.isdisjoint(_GLOBALS):
        return None
    known = {name for name in bound - parameters if names.is_bound(name, By.RESULT)}
    left = {name for name in bound & parameters if not _bound_first(function, name)}
    left |= {name for name in bound if _is_other(names.sources[name])}
    names.carried = (lengths - bound) | known | sent
    names.plain = bound - names.carried - left
    # What lengths take part in is not plain, and what follows from anything else is not known.
    while more := {name for name in names.plain if any(map(names.uses, names.values(name)))}:
        names.hosted, names.plain = names.hosted | more, names.plain - more
    while left := {
        name for name in names.hosted | names.plain if not all(map(names.follows, names.values(name)))
    }:
        names.hosted, names.plain = names.hosted - left, names.plain - left
    return names


def _is_other(sources: list[Binding]) -> bool:
    """Whether a value of a name is unknown, or a change may be one of another tensor, or a part of it."""
    bound = [value for _, value, by in sources if by is not By.CHANGE]
    forms = (ast.Name, ast.Subscript, ast.Attribute)
    changed = len(bound) < len(sources)
    return None in bound or (changed and any(isinstance(value, forms) for value in bound))


def bindings(node: ast.AST, returned: Mapping[str, set[int]]) -> Iterator[Binding]:
    """What a statement or a part of one binds or changes; ``returned`` as for `names_of`."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value, By.ASSIGNMENT
        case (
            ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=index)], value=value)
            | ast.AugAssign(target=ast.Subscript(value=ast.Name(id=name), slice=index), value=value)
        ):
            yield from ((name, part, By.CHANGE) for part in (value, index))
        case ast.AugAssign(target=ast.Name(id=name), value=value):
            yield name, value, By.CHANGE
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=args) as call):
            values = (*args, *(keyword.value for keyword in call.keywords))
            yield from ((name, value, By.CHANGE) for value in values)
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield from ((name, value, By.LOOP) for name in read_names(target))
        case ast.Assign(targets=[ast.Tuple(elts=parts)], value=ast.Call(func=function)):
            known = returned.get(own_attribute(function), ())
            for at, part in enumerate(parts):
                by = By.RESULT if at in known else By.ASSIGNMENT
                yield from ((name, None, by) for name in read_names(part))
        case ast.Assign() | ast.AnnAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((name, None, By.ASSIGNMENT) for part in targets for name in read_names(part))


def _bound_first(function: FunctionNode, name: str) -> bool:
    """Whether a function assigns an argument before it uses it, in a statement of its own."""
    first = next(statement for statement in function.body if name in read_names(statement))
    match [*bindings(first, {})]:
        case [(bound, ast.expr() as value, By.ASSIGNMENT)]:
            return bound == name and name not in read_names(value)
    return False


def device_of(node: ast.expr) -> str:
    """``x`` of ``x.device``; empty for other code."""
    match node:
        case ast.Attribute(value=ast.Name(id=name), attr="device"):
            return name
    return ""


def is_device(node: ast.AST) -> bool:
    """Whether a part of an expression says on which device a result is."""
    return isinstance(node, ast.keyword) and node.arg == "device"


def names_outside(node: ast.AST, skipped: Callable[[ast.AST], bool]) -> set[str]:
    """The names that an expression reads, without those in parts that are ``skipped``."""
    return {*loaded([node], [part for part in walk_ast(node) if skipped(part)])}
