"""Decide on the layer loop of one model: what to slice before it and where to gather, or why not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import loaded, own_names
from veomni_hook.patches.code.tree import last_name, own_attribute, walk_ast
from veomni_hook.patches.idioms.layer_loop.additions import Addition, addition_in, without
from veomni_hook.patches.idioms.layer_loop.positions import Positions
from veomni_hook.patches.idioms.layer_loop.values import (
    BATCH,
    POSITIONS,
    Module,
    Plain,
    Size,
    Tensor,
    Unknown,
    Value,
    Whole,
    fresh,
    is_positional,
    of_all,
)
from veomni_hook.patches.interpreter.domain import Frame
from veomni_hook.patches.interpreter.walk import evaluate, run
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed

__all__ = ["Loop", "decided", "hidden_of", "loops"]

_WRAPPERS = ("enumerate", "zip", "reversed", "list", "tuple")
_COLLECTED = "layers' outputs are collected inside the loop"


@dataclass(frozen=True)
class Loop:
    """What to do with a loop.

    Attributes:
        statement: the loop, a statement of the forward's body.
        hidden: the name of the hidden states.
        others: the names of what else is sliced.
        last: the last statement that works on a part of the positions.
        followed: the functions and methods of the file that run inside.
        masks: arguments inside that must be a part of a mask of padding.
        addition: the statement inside that adds rows.
    """

    statement: ast.For
    hidden: str
    others: tuple[str, ...]
    last: ast.stmt
    followed: tuple[str, ...]
    masks: tuple[ast.expr, ...]
    addition: Addition | None = None


def loops(forward: FunctionNode) -> Iterator[ast.For]:
    """The loops of a forward that call each of the modules in one of its own lists."""
    for node in walk_ast(forward):
        if isinstance(node, ast.For) and any(map(own_attribute, walk_ast(node.iter))):
            names = {each.id for each in walk_ast(node.target) if isinstance(each, ast.Name)}
            if any(_calls(each, names) for each in walk_ast(node)):
                yield node


def _calls(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    # Older code passes `layer.__call__` to its function for checkpointing.
    given = [node.func, *node.args[:1]]
    given += [each.value for each in given if isinstance(each, ast.Attribute) and each.attr == "__call__"]
    return any(isinstance(each, ast.Name) and each.id in names for each in given[:1] + given[2:])


def decided(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, found: list[ast.For]) -> Loop:
    """What to do with the loop of a model.

    Raises:
        Missed: it is refused; the text says why.
    """
    statement = found[0]
    if any(
        "cross_attn" in last_name(node) for node in walk_ast(statement)
    ) or "encoder_hidden_states" in loaded(forward.body):
        raise Missed(
            "cross attention: the layers also attend to another model's output", statement, Code.OTHER_LOOP
        )
    if len(found) > 1:
        raise Missed(
            f"there is another loop over layers at line {found[1].lineno}", statement, Code.OTHER_LOOP
        )
    if statement not in forward.body:
        raise Missed("the loop is inside another statement", statement, Code.OTHER_LOOP)
    if _collects(statement):
        raise Missed(_COLLECTED, statement, Code.OTHER_LOOP)
    hidden = hidden_of(statement)
    errors = []
    # Models with several kinds of positions (text, height, width) have one more dimension.
    for ids in (((BATCH,), (POSITIONS,)), (fresh(), (BATCH,), (POSITIONS,))):
        try:
            return _Reading(view, owner, forward, statement, hidden, Tensor(ids)).decided()
        except Missed as error:
            errors.append(error)
    raise errors[0]


def _collects(loop: ast.For) -> bool:
    """Whether a loop adds to tuples or lists."""
    for node in walk_ast(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Tuple | ast.List):
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.right, ast.Tuple):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            return True
    return False


def hidden_of(loop: ast.For) -> str:
    """The name of the hidden states: the first argument of the layer's call.

    Raises:
        Missed: no layer is called, or it does not get a name.
    """
    names = {each.id for each in walk_ast(loop.target) if isinstance(each, ast.Name)}
    for node in walk_ast(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            first = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "hidden_states")]
            if first and isinstance(first[0], ast.Name):
                return first[0].id
            raise Missed("the layers do not get their hidden states by name", node, Code.OTHER_LOOP)
    raise Missed("the layers are not called directly", loop, Code.OTHER_LOOP)


class _Reading:
    """One reading of a forward: what is known of its values before, in and after the loop."""

    def __init__(
        self,
        view: ModuleView,
        owner: ast.ClassDef,
        forward: FunctionNode,
        statement: ast.For,
        hidden: str,
        ids: Tensor,
    ) -> None:
        self.forward, self.statement, self.hidden = forward, statement, hidden
        self.positions = Positions(view)
        self.addition = addition_in(view, owner, forward, statement, hidden)
        self.given: dict[str, Value] = {
            "input_ids": Tensor(((BATCH,), (POSITIONS,))),
            "inputs_embeds": Tensor(((BATCH,), (POSITIONS,), fresh())),
            "token_type_ids": Tensor(((BATCH,), (POSITIONS,))),
            "position_ids": ids,
        }
        names = [
            each.arg for each in (*forward.args.posonlyargs, *forward.args.args, *forward.args.kwonlyargs)
        ]
        self.scope: dict[str, Value] = {name: Whole(name) for name in names}
        self.scope[names[0]] = Module((owner.name,))
        self.scope.update({name: value for name, value in self.given.items() if name in names})
        if forward.args.kwarg is not None:
            self.scope[forward.args.kwarg.arg] = Whole(f"**{forward.args.kwarg.arg}")

    def decided(self) -> Loop:
        at = self.forward.body.index(self.statement)
        self.positions.before = True
        for statement in self.forward.body[:at]:
            self._before(statement)
        self.positions.before = False
        self.positions.followed.clear()
        tail = self.forward.body[at + 1 :]
        others = self._sliced(tail)
        self._check_layers()
        self.scope = self._followed(without(self.statement, self.addition))
        if not _is_hidden(self.scope.get(self.hidden)):
            raise Missed(f"{self.hidden} has another shape after the loop", self.statement, Code.OTHER_LOOP)
        last, tail = self._norm(tail)
        for name in dict.fromkeys(loaded(tail)):
            if name != self.hidden and _holds_part(self.scope.get(name)):
                raise Missed(
                    f"{name} is used after the loop, and holds a part of the positions",
                    tail[0],
                    Code.USED_OTHERWISE,
                )
        added = {self.addition.target} if self.addition is not None else set()
        followed = tuple(sorted({*self.positions.followed, *added}))
        masks = tuple(self.positions.masks.values())
        return Loop(self.statement, self.hidden, others, last, followed, masks, self.addition)

    def _followed(self, statement: ast.stmt) -> dict[str, Value]:
        """What is known of names after a statement."""
        frame = Frame(self.positions, dict(self.scope))
        run([statement], frame)
        return frame.values

    def _before(self, statement: ast.stmt) -> None:
        """Follow a statement before the loop; what cannot be followed holds all positions."""
        try:
            scope = self._followed(statement)
        except Missed:
            self.scope.update({name: Whole(name) for name in own_names([statement])})
        else:
            self.scope = scope
            for name in own_names([statement]):
                if isinstance(scope.get(name), Whole):
                    scope[name] = Whole(name)
        self.scope.update({name: value for name, value in self.given.items() if name in self.scope})

    def _sliced(self, tail: list[ast.stmt]) -> tuple[str, ...]:
        """The names that are sliced beside the hidden states; all others hold all positions from here on."""
        if not _is_hidden(self.scope.get(self.hidden)):
            text = f"how {self.hidden} are made is not followed, so they may not be [batch, positions, width]"
            raise Missed(text, self.statement)
        read = dict.fromkeys(loaded([self.statement]))
        others = [
            name
            for name in read
            if name != self.hidden and name in self.scope and _is_sliceable(self.scope[name])
        ]
        for name in self.scope:
            if name not in (*others, self.hidden) and _holds_part(self.scope[name]):
                self.scope[name] = Whole(name)
        later = loaded(tail)
        for name in others:
            if name in later:
                raise Missed(
                    f"{name} is sliced for the layers and used after them",
                    self.statement,
                    Code.USED_OTHERWISE,
                )
        return tuple(others)

    def _check_layers(self) -> None:
        value = evaluate(self.statement.iter, Frame(self.positions, dict(self.scope)))
        modules = [each for each in of_all([value]) if isinstance(each, Module)]
        if not modules:
            raise Missed("the classes of the layers are not known", self.statement, Code.UNKNOWN_MODULE)

    def _norm(self, tail: list[ast.stmt]) -> tuple[ast.stmt, list[ast.stmt]]:
        """The last statement that works on a part of the positions, and what follows it."""
        first = tail[0] if tail else None
        if (
            isinstance(first, ast.Assign)
            and isinstance(first.value, ast.Call)
            and own_attribute(first.value.func)
        ):
            given = [*first.value.args, *(each.value for each in first.value.keywords)]
            named = [each for each in (*given, *first.targets) if isinstance(each, ast.Name)]
            if len(given) == 1 and len(named) == 2 and {each.id for each in named} == {self.hidden}:
                try:
                    scope = self._followed(first)
                except Missed:
                    return self.statement, tail
                if _is_hidden(scope[self.hidden]):
                    return first, tail[1:]
        return self.statement, tail


def _is_hidden(value: Value | None) -> bool:
    dims = value.dims if isinstance(value, Tensor) else ()
    return len(dims) == 3 and dims[:2] == ((BATCH,), (POSITIONS,)) and not is_positional(dims[2])


def _is_sliceable(value: Value) -> bool:
    """Whether a value is a tensor ``[..., positions, width]``, or holds only such tensors."""
    held = list(of_all([value]))
    tensors = [each for each in held if isinstance(each, Tensor)]
    return bool(tensors) and all(
        each == Plain(None) or (isinstance(each, Tensor) and _has_rows(each.dims)) for each in held
    )


def _has_rows(dims: tuple[tuple[str, ...], ...]) -> bool:
    return len(dims) >= 3 and dims[-2] == (POSITIONS,) and sum(map(is_positional, dims)) == 1


def _holds_part(value: Value | None) -> bool:
    held = of_all([value]) if value is not None else ()
    return any(
        isinstance(each, Tensor | Unknown) or (isinstance(each, Size) and is_positional(each.dim))
        for each in held
    )
