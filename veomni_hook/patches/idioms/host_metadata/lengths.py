"""Towers that compute with lengths of sounds themselves, before transformers had functions for it.

    torch.ceil(feature_lens / 100)        ->  torch.ceil(veomni_host.values(feature_lens) / 100)
    torch.zeros(n, device=states.device)  ->  torch.zeros(n, device=veomni_host.values(feature_lens).device)
    boundaries = torch.cat(...)           ->  veomni_host.sent(torch.cat(...), feature_lens.device)
    states[mask]                          ->  states[veomni_host.picked(mask)]

What follows from lengths alone (`binding`) stays on the host, where reading it costs nothing, and goes to the
device where something else uses it. A forward qualifies by an argument whose name ends with ``_lens``;
methods of the class that get such tensors from it are followed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit, apply_edits
from veomni_hook.patches.code.scope import parameter_names
from veomni_hook.patches.code.tree import child_nodes, last_name, own_attribute, walk_ast
from veomni_hook.patches.idioms.host_metadata.binding import NUMBERS, Names, device_of, names_of
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView

__all__ = ["computed_lengths", "computed_sizes"]

_LENS = "_lens"
#: What takes sizes of its result.
_SIZED = {"full", "zeros", "ones", "empty", "view", "reshape", "expand", "split", "new_zeros", "new_full"}
_ABOUT = {"device", "dtype", "shape", "ndim"}


def computed_lengths(
    view: ModuleView, methods: dict[str, FunctionNode], is_number: Callable[[str], bool]
) -> dict[str, list[Edit]]:
    """The edits of a tower's forward and of methods that get lengths from it; empty if none reads."""
    forward = methods.get("forward")
    given = {name for name in parameter_names(forward) if name.endswith(_LENS)} if forward else set()
    if forward is None or not given:
        return {}
    taken: dict[str, set[str]] = {"forward": given}
    found: dict[str, _Written] = {}
    # A method's results may be lengths for the next one: until no more is found.
    while True:
        known = {name: each.returned for name, each in found.items()}
        before = {name: set(each) for name, each in taken.items()}
        for name in before:
            written = _written(view, methods, name, taken[name], is_number, known)
            if written is None:
                return {}
            found[name] = written
            for method, arguments in written.handed.items():
                taken.setdefault(method, set()).update(arguments)
        if taken == before and known == {name: each.returned for name, each in found.items()}:
            break
    if not any(each.reads for each in found.values()):
        return {}
    return {name: each.edits for name, each in found.items() if each.edits}


def computed_sizes(
    view: ModuleView, method: FunctionNode, sizes: set[str], is_number: Callable[[str], bool]
) -> list[Edit]:
    """The edits of a method that makes other sizes of ``sizes``, such as those of the frames of a video."""
    written = _written(view, {method.name: method}, method.name, sizes, is_number, {})
    return written.edits if written is not None and written.reads else []


@dataclass
class _Written:
    """How a function changes, what it hands to other methods, and which of its results carry values."""

    edits: list[Edit] = field(default_factory=list)
    handed: dict[str, set[str]] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    reads: bool = False


def _written(
    view: ModuleView,
    methods: dict[str, FunctionNode],
    name: str,
    given: set[str],
    is_number: Callable[[str], bool],
    known: dict[str, set[int]],
) -> _Written | None:
    def results(value: ast.expr) -> set[int]:
        return known.get(own_attribute(value.func), set()) if isinstance(value, ast.Call) else set()

    function = methods[name]
    sent: set[str] = set()
    while True:
        names = names_of(function, given, sent, is_number, results)
        length = None if names is None else _most_used(function, given & names.carried)
        if names is None or length is None:
            return None
        writer = _Writer(view, methods, names, length, sent)
        for statement in function.body:
            writer.statement(statement)
        if writer.refused:
            return None
        if not writer.wanted - sent:
            return writer.written
        sent = sent | writer.wanted


def _most_used(function: FunctionNode, names: set[str]) -> str | None:
    uses = Counter(each.id for each in walk_ast(function) if isinstance(each, ast.Name) and each.id in names)
    return max(sorted(uses), key=uses.__getitem__, default=None)


class _Writer:
    """Writes the edits of one function."""

    def __init__(
        self, view: ModuleView, methods: dict[str, FunctionNode], names: Names, length: str, sent: set[str]
    ) -> None:
        self.view, self.methods, self.names, self.length, self.sent = view, methods, names, length, sent
        self.written = _Written()
        #: Names that are to be sent to the device where they are bound.
        self.wanted: set[str] = set()
        self.refused = False

    def statement(self, node: ast.stmt) -> None:
        """Write what a statement and those in it need."""
        if isinstance(node, ast.Assign | ast.AugAssign) and self.names.follows(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            kept = {root in self._kept for target in targets for root in _roots(target)}
            if kept == {True}:
                name = targets[0].id if isinstance(targets[0], ast.Name) else ""
                self._send(node.value) if name in self.sent else self._read(node.value)
                for target in targets:
                    self._read(target)
                return
            self.refused |= True in kept
        match node:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name))) as call) if (
                name in self._kept
            ):
                self._read(call)
                return
        for child in child_nodes(node):
            if isinstance(child, ast.stmt):
                self.statement(child)
            elif isinstance(child, ast.expr):
                alone = isinstance(node, ast.For | ast.If | ast.While) and self.names.follows(child)
                self._expression(child, node, reads=alone)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            self.written.returned |= {at for at, each in enumerate(node.value.elts) if self._known(each)}

    @property
    def _kept(self) -> set[str]:
        """What stays on the host, or is computed there and sent at once."""
        return self.names.hosted | self.names.plain | self.sent

    def _known(self, node: ast.expr) -> bool:
        return self.names.follows(node) and self.names.uses(node)

    def _expression(self, node: ast.AST, parent: ast.AST, *, reads: bool) -> None:
        """Write what an expression needs that also computes with other values."""
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            return
        place = isinstance(node, ast.Slice) or (
            isinstance(node, ast.Tuple) and isinstance(parent, ast.Subscript)
        )
        if isinstance(node, ast.expr) and not place and self._known(node):
            if isinstance(node, ast.Attribute) and node.attr in _ABOUT:
                self._about(node)
            elif reads or isinstance(parent, ast.Slice | ast.comprehension) or self._is_number(node):
                self._read(node)
            else:
                indexes = isinstance(parent, ast.Subscript) and node is parent.slice
                self._use(node, indexes=indexes)
            return
        if isinstance(node, ast.Call):
            self._hand(node)
        called = node.func if isinstance(node, ast.Call) else None
        for child in child_nodes(node):
            if child is called and isinstance(child, ast.Attribute):
                self._expression(child.value, child, reads=False)
                continue
            inner = reads and isinstance(node, ast.Tuple | ast.List | ast.keyword)
            sized = called is not None and last_name(called) in _SIZED
            self._expression(child, node, reads=inner or sized)

    def _is_number(self, node: ast.expr) -> bool:
        """Whether an expression gives a number of the host, or a list of them."""
        if isinstance(node, ast.Call) and last_name(node.func) in NUMBERS:
            return isinstance(node.func, ast.Name) or last_name(node.func) in ("tolist", "item")
        shapes = {
            id(each.value)
            for each in walk_ast(node)
            if isinstance(each, ast.Attribute) and each.attr == "shape"
        }
        tensors = {
            each.id for each in walk_ast(node) if isinstance(each, ast.Name) and id(each) not in shapes
        }
        return not tensors & (self.names.carried | self.names.hosted) - self.names.steps

    def _about(self, node: ast.Attribute) -> None:
        """The device of what stays on the host is where upstream has it."""
        if node.attr == "device" and isinstance(node.value, ast.Name) and node.value.id in self.names.hosted:
            self._edit(node, self._home(node.value))

    def _read(self, node: ast.AST) -> None:
        """Compute an expression on the host."""
        for each in self._places(node):
            if isinstance(each, ast.Name):
                self._edit(each, f"veomni_host.values({each.id})")
            else:
                self._edit(each, f"veomni_host.values({self.length}).device")
            self.written.reads = True

    def _places(self, node: ast.AST) -> Iterator[ast.expr]:
        """Tensors of the device in an expression, and what says where results are."""
        for child in [node] if isinstance(node, ast.Name) else child_nodes(node):
            if isinstance(child, ast.keyword) and child.arg == "device":
                base = device_of(child.value)
                if base not in self.names.hosted:
                    yield from self._places(child.value) if base in self.names.carried else [child.value]
            elif isinstance(child, ast.Name):
                if child.id in self.names.carried and isinstance(child.ctx, ast.Load):
                    yield child
            elif not (isinstance(child, ast.Attribute) and child.attr == "shape"):
                yield from self._places(child)

    def _send(self, node: ast.expr, *, indexes: bool = False) -> None:
        """Compute an expression on the host, and send the result to the device."""
        edits = self.written.edits
        at, start = len(edits), self.view.document.start(node)
        self._read(node)
        inner = [replace(each, start=each.start - start, end=each.end - start) for each in edits[at:]]
        text = f"veomni_host.sent({apply_edits(self.view.text(node), inner)}, {self._home(node)})"
        edits[at:] = [in_place(self.view, node, f"veomni_host.picked({text})" if indexes else text)]

    def _use(self, node: ast.expr, *, indexes: bool) -> None:
        """Where an expression is needed on the device."""
        name = node.id if isinstance(node, ast.Name) else ""
        if name in self.names.carried:
            if indexes:
                self._edit(node, f"veomni_host.picked({name})")
                self.written.reads = True
        elif name in self.names.whole:
            self.wanted.add(name)
        else:
            self._send(node, indexes=indexes)

    def _home(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> str:
        """The device on which upstream has what an expression computes."""
        for each in walk_ast(node):
            if (
                isinstance(each, ast.keyword)
                and each.arg == "device"
                and device_of(each.value) not in self.names.hosted
            ):
                return self.view.text(each.value)
        for each in walk_ast(node):
            if not isinstance(each, ast.Name) or each.id in seen:
                continue
            if each.id in self.names.carried - self.sent:
                return f"{each.id}.device"
            source = self.names.sources[each.id][0] if each.id in self.names.hosted | self.sent else None
            if source is not None:
                return self._home(source, seen | {each.id})
        return f"{self.length}.device"

    def _hand(self, call: ast.Call) -> None:
        """Note which arguments of a method of this class are known."""
        name = own_attribute(call.func)
        method = self.methods.get(name)
        if method is None or method.decorator_list or name == "forward":
            return
        order = [each.arg for each in method.args.args[1:]]
        arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in order}
        arguments |= dict(zip(order, call.args, strict=False))
        found = {each for each, value in arguments.items() if each is not None and self._known(value)}
        if found and not any(isinstance(each, ast.Starred) for each in call.args):
            self.written.handed.setdefault(name, set()).update(found)

    def _edit(self, node: ast.expr, text: str) -> None:
        self.written.edits.append(in_place(self.view, node, text))


def _roots(target: ast.expr) -> Iterator[str]:
    """The names that an assignment binds or changes; empty for others."""
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _roots(part)
        case ast.Subscript(value=ast.Name(id=name)) | ast.Name(id=name):
            yield name
        case _:
            yield ""
