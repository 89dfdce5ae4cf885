"""Towers that compute with lengths of sounds themselves, before transformers had functions for it.

    torch.ceil(feature_lens / 100)        ->  torch.ceil(veomni_host.values(feature_lens) / 100)
    torch.zeros(n, device=states.device)  ->  torch.zeros(n, device=veomni_host.values(feature_lens).device)
    boundaries = torch.cat(...)           ->  veomni_host.sent(torch.cat(...), feature_lens.device)
    states[mask]                          ->  states[veomni_host.picked(mask)]

What follows from lengths alone (`binding`) stays on the host, where reading it costs nothing, and goes to the
device where something else uses it. Methods of the class that get such tensors are followed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.tree import child_nodes, last_name, own_attribute, walk_ast
from veomni_hook.patches.idioms.host_metadata.binding import (
    NUMBERS,
    By,
    Names,
    bindings,
    device_of,
    names_of,
    names_outside,
)
from veomni_hook.patches.interpreter.walk import bound
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["computed"]

#: What takes sizes of its result.
_SIZED = {"full", "zeros", "ones", "empty", "view", "reshape", "expand", "split", "new_zeros", "new_full"}
_ABOUT = {"device", "dtype", "shape", "ndim"}


def computed(
    view: ModuleView,
    methods: dict[str, FunctionNode],
    start: str,
    lengths: set[str],
    is_number: Callable[[str], bool],
) -> dict[str, list[Edit]]:
    """The edits of a method that gets lengths, and of methods that get some from it; empty if none reads."""
    handed = {start: lengths}
    returned: dict[str, set[int]] = {}
    sent: dict[str, set[str]] = {}

    # A method's results may be lengths for the next one: until no more is found.
    while True:
        writers: dict[str, _Writer] = {}
        for name, arguments in handed.items():
            names = names_of(methods[name], arguments, sent.get(name, set()), is_number, returned)
            if names is None:
                return {}
            writers[name] = _Writer(view, methods, names)
            for statement in methods[name].body:
                writers[name].statement(statement)
        if any(writer.wanted for writer in writers.values()):
            sent = {name: writer.names.sent | writer.wanted for name, writer in writers.items()}
            continue
        before = handed, returned
        handed = {**handed}
        for name, arguments in (entry for writer in writers.values() for entry in writer.handed.items()):
            handed[name] = handed.get(name, set()) | arguments
        returned, sent = {name: writer.returned for name, writer in writers.items()}, {}
        if (handed, returned) == before:
            reads = any(writer.reads for writer in writers.values())
            return {name: writer.edits for name, writer in writers.items() if reads and writer.edits}


@dataclass
class _Writer:
    """Writes how one function changes.

    Attributes:
        view: the module.
        methods: those of the class.
        names: what is known of the function's names.
        edits: the changes.
        reads: whether it reads lengths.
        handed: the arguments with lengths that other methods get.
        returned: the elements of the result whose values the host knows.
        wanted: the names that are to be sent to the device where they are bound.
    """

    view: ModuleView
    methods: dict[str, FunctionNode]
    names: Names
    edits: list[Edit] = field(default_factory=list)
    reads: bool = False
    handed: dict[str, set[str]] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)

    def statement(self, node: ast.stmt) -> None:
        """Write what a statement and those in it need."""
        if self._stays(node):
            return
        for child in child_nodes(node):
            if isinstance(child, ast.stmt):
                self.statement(child)
            elif isinstance(child, ast.expr):
                alone = isinstance(node, ast.For | ast.If | ast.While) and self.names.follows(child)
                self._expression(child, node, reads=alone)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            self.returned |= {at for at, element in enumerate(node.value.elts) if self._known(element)}

    def _stays(self, node: ast.stmt) -> bool:
        """Write a statement that binds or changes only what stays on the host; False if it is another one."""
        kept = self.names.hosted | self.names.plain | self.names.sent
        bound = () if isinstance(node, ast.For) else [*bindings(node, {})]
        if not bound or not all(name in kept for name, _, _ in bound):
            return False
        for name, value, _ in bound:
            if value is not None:
                self._send(value) if name in self.names.sent else self._read(value)
        return True

    def _known(self, node: ast.AST) -> bool:
        return self.names.follows(node) and self.names.uses(node)

    def _expression(self, node: ast.AST, parent: ast.AST, *, reads: bool) -> None:
        """Write what an expression needs that also computes with other values."""
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            return
        indexes = isinstance(parent, ast.Subscript) and node is parent.slice
        called = isinstance(parent, ast.Call) and node is parent.func
        part = isinstance(node, ast.Slice) or called or (isinstance(node, ast.Tuple) and indexes)
        if isinstance(node, ast.expr) and not part and self._known(node):
            if isinstance(node, ast.Attribute) and node.attr in _ABOUT:
                # The device of what stays on the host is where upstream has it.
                if device_of(node) in self.names.hosted:
                    self._edit(node, self._home(node.value))
            elif reads or isinstance(parent, ast.Slice | ast.comprehension) or self._is_number(node):
                self._read(node)
            else:
                self._use(node, indexes=indexes)
            return
        if isinstance(node, ast.Call):
            self._hand(node)
        sized = isinstance(node, ast.Call) and last_name(node.func) in _SIZED
        inner = reads and isinstance(node, ast.Tuple | ast.List | ast.keyword)
        for child in child_nodes(node):
            self._expression(child, node, reads=inner or sized)

    def _is_number(self, node: ast.expr) -> bool:
        """Whether an expression gives a number of the host, or a list of them."""
        if isinstance(node, ast.Call) and last_name(node.func) in NUMBERS:
            return True
        known = names_outside(node, _is_shape) & (self.names.carried | self.names.hosted)
        return all(self.names.is_bound(name, By.LOOP) for name in known)

    def _read(self, node: ast.AST) -> None:
        """Compute an expression on the host."""
        for place in self._places(node):
            if isinstance(place, ast.Name):
                self._edit(place, f"veomni_host.values({place.id})")
            else:
                self._edit(place, f"veomni_host.values({self.names.length}).device")
            self.reads = True

    def _places(self, node: ast.AST) -> Iterator[ast.expr]:
        """Tensors of the device in an expression, and what says where results are."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in self.names.carried:
                yield node
            case ast.keyword(arg="device", value=value):
                base = device_of(value)
                if base not in self.names.hosted:
                    yield from self._places(value) if base in self.names.carried else [value]
            case _ if not _is_shape(node):
                for child in child_nodes(node):
                    yield from self._places(child)

    def _send(self, node: ast.expr, *, indexes: bool = False) -> None:
        """Compute an expression on the host, and send the result to the device."""
        at = len(self.edits)
        self._read(node)
        text = f"veomni_host.sent({self.view.edited(node, self.edits[at:])}, {self._home(node)})"
        self.edits[at:] = [in_place(self.view, node, f"veomni_host.picked({text})" if indexes else text)]

    def _use(self, node: ast.expr, *, indexes: bool) -> None:
        """Where an expression is needed on the device."""
        name = node.id if isinstance(node, ast.Name) else ""
        if name in self.names.carried:
            if indexes:
                self._edit(node, f"veomni_host.picked({name})")
                self.reads = True
        elif self.names.is_bound(name, By.ASSIGNMENT):
            self.wanted.add(name)
        else:
            self._send(node, indexes=indexes)

    def _home(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> str:
        """The device on which upstream has what an expression computes."""
        names = self.names
        for part in walk_ast(node):
            match part:
                case ast.keyword(arg="device", value=device) if device_of(device) not in names.hosted:
                    return self.view.text(device)
        for part in walk_ast(node):
            if not isinstance(part, ast.Name) or part.id in seen:
                continue
            if part.id in names.carried - names.sent:
                return f"{part.id}.device"
            if part.id in names.hosted | names.sent:
                return self._home(names.values(part.id)[0], seen | {part.id})
        return f"{self.names.length}.device"

    def _hand(self, call: ast.Call) -> None:
        """Note which arguments of a method of this class are known."""
        name = own_attribute(call.func)
        method = self.methods.get(name)
        if method is None or method.decorator_list or name == "forward":
            return
        keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        arguments = bound(method, [call.func, *call.args], keywords).values
        known = {name for name, value in arguments.items() if self._known(value)}
        if known and not any(isinstance(argument, ast.Starred) for argument in call.args):
            self.handed.setdefault(name, set()).update(known)

    def _edit(self, node: ast.expr, text: str) -> None:
        self.edits.append(in_place(self.view, node, text))


def _is_shape(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "shape"
