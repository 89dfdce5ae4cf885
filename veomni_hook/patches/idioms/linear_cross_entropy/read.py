"""Read the end of a language model's ``forward``, from the head to the output.

The reader accepts code in which logits are only transformed elementwise, passed to one loss and put into the
output. Code before the loss must be plain; code after it may do anything that does not use logits. A branch
that uses logits otherwise is allowed if its test can be evaluated beforehand.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from veomni_hook.patches.code.comparison import serialise
from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.scope import bound_names, used_names
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import (
    binding,
    calls_in,
    chain,
    compared_with_none,
    contains,
    in_text_order,
    is_plain,
    last_name,
)
from veomni_hook.patches.idioms.linear_cross_entropy.logits import Logits, Step, needed, options
from veomni_hook.patches.site import Code, Missed

__all__ = ["Tail", "loss_calls", "passes_vocabulary", "read_tail"]

MOVED = Template("X.to(LOGITS.device)", names="LOGITS")
POPPED = Template("KEYWORDS.pop(KEY, DEFAULT)", names="KEYWORDS")
WIDTH = Template("LOGITS.shape[-1]", names="LOGITS")
#: A head or a module in front of it, which takes hidden states alone.
APPLIED = Template("MODULE(STATES)")
NEGATED = Template("not TEST")
OUTPUT = Template("OUTPUT(*ARGUMENTS, logits=LOGITS, **OTHERS)", names="LOGITS")
_OPERANDS = _LOGITS, _LABELS, _VOCABULARY = ("logits", "labels", "vocab_size")


@dataclass(frozen=True, slots=True)
class Tail:
    """What a guard needs to know.

    Attributes:
        statement: the statement that calls the head; the guard is inserted before it.
        conditions: tests that must all hold.
        numbers: tests that the numbers which scale logits are not None.
        loss: the name that the loss is bound to.
        logits: the name of the logits in ``output``.
        head: the module that computes logits.
        hidden_states: the argument of ``head``, or of ``before_head`` if there is one.
        before_head: a module that is applied to hidden states in the argument of the head.
        labels: the labels that the loss function gets.
        vocabulary: the vocabulary size that the loss function gets.
        keywords: its other keywords; one without a position is overridden by the same keyword of the caller.
        transform: the steps applied to logits, as options of the kernel.
        copied: statements between the loss and the output.
        output: the call that creates the output.
    """

    statement: ast.stmt
    conditions: tuple[ast.expr, ...]
    numbers: tuple[ast.expr, ...]
    loss: str
    logits: str
    head: ast.expr
    hidden_states: ast.expr
    before_head: ast.expr | None
    labels: ast.expr
    vocabulary: ast.expr
    keywords: tuple[ast.keyword, ...]
    transform: Mapping[str, ast.expr]
    copied: tuple[ast.stmt, ...]
    output: ast.Call


def loss_calls(function: FunctionNode) -> list[ast.Call]:
    """Every call of ``self.loss_function`` in ``function``, in text order."""
    return in_text_order(call for call in calls_in(function) if chain(call.func) == "self.loss_function")


def passes_vocabulary(call: ast.Call) -> bool:
    """Whether a loss gets a vocabulary size, as the loss of a language model does."""
    if any(keyword.arg == "vocab_size" for keyword in call.keywords):
        return True
    third = call.args[2] if len(call.args) > 2 else None
    return third is not None and last_name(third).endswith("_size")


def read_tail(
    function: FunctionNode,
    call: ast.Call,
    resolve: Callable[[ast.expr], str],
    cap: Callable[[ast.expr], ast.expr | None],
) -> Tail:
    """Read what ``function`` does around its ``call`` of the loss.

    Args:
        function: a ``forward``.
        call: its only call of ``self.loss_function`` that passes a vocabulary size.
        resolve: returns the full name of an expression according to the module's imports, or nothing.
        cap: returns an operand for a called module that only caps logits, or None; see `Logits`.

    Raises:
        Missed: something is not understood.
    """
    return _Reader(function, call, Logits(resolve, cap)).read()


class _Reader:
    def __init__(self, function: FunctionNode, call: ast.Call, logits: Logits) -> None:
        self._body = function.body
        self._call = call
        self._given = dict(zip(_OPERANDS, call.args, strict=False))
        self._given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in _OPERANDS}
        self._logits = logits
        self._conditions: list[ast.expr] = []
        # Locals of the form ``kwargs.pop(key, default)``: (kwargs, key, default).
        self._popped: dict[str, tuple[str, str, ast.expr]] = {}
        self._plain: list[ast.stmt] = []
        self._left_out: list[ast.stmt] = []
        self._copied: list[ast.stmt] = []

    def read(self) -> Tail:
        body = self._body
        at = self._at(body)
        branch = body[at]
        inside = branch.body if isinstance(branch, ast.If) else [branch]
        at_call = self._at(inside)
        loss, value = binding(inside[at_call])
        if value is not self._call:
            raise Missed(
                "the loss is computed in a nested branch, or not bound to a name", self._call, Code.NO_ROOM
            )
        origin = self._origin(body[:at])
        self._bind(body[origin])
        for statement in body[origin + 1 : at]:
            self._before_loss(statement)
        if isinstance(branch, ast.If):
            self._conditions.insert(0, self._known(branch.test))
        for statement in inside[:at_call]:
            self._before_loss(statement)
        labels, vocabulary, keywords = self._operands()
        output = self._after_loss([*inside[at_call + 1 :], *body[at + 1 :]], loss)
        logits, steps = self._returned(output)
        transform = options(steps, output)
        head, hidden_states, before_head = self._head()
        return Tail(
            statement=body[origin],
            conditions=tuple(self._conditions),
            numbers=tuple(needed(steps)),
            loss=loss,
            logits=logits,
            head=head,
            hidden_states=hidden_states,
            before_head=before_head,
            labels=labels,
            vocabulary=vocabulary,
            keywords=keywords,
            transform=transform,
            copied=self._needed(output, {loss, logits}),
            output=output,
        )

    # Before the loss

    def _at(self, block: Sequence[ast.stmt]) -> int:
        for index, statement in enumerate(block):
            if contains(statement, self._call):
                return index
        raise Missed("the loss is computed in an else", self._call, Code.NO_ROOM)

    def _origin(self, before: Sequence[ast.stmt]) -> int:
        """The index of the statement that the loss's first argument comes from."""
        given = self._argument(_LOGITS)
        if not isinstance(given, ast.Name):
            raise Missed(
                f"the loss is not computed from logits but from {ast.unparse(given)}", given, Code.OTHER_FORM
            )
        for index in range(len(before) - 1, -1, -1):
            statement = before[index]
            name, value = binding(statement)
            if value is not None and name == given.id:
                if name not in used_names([value]):
                    return index
            elif given.id in bound_names([statement]) and not isinstance(statement, ast.If):
                raise Missed(
                    f"{given.id} is bound in a {type(statement).__name__.lower()}", statement, Code.NO_ROOM
                )
        raise Missed(f"{given.id} does not come from a statement of the forward itself", given, Code.NO_ROOM)

    def _bind(self, statement: ast.stmt) -> None:
        self._logits.bind(statement)
        self._left_out.append(statement)

    def _before_loss(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.If):
            self._conditional(statement)
            return
        name, value = binding(statement)
        if value is None:
            used = "logits are used in another way" if self._logits.mentioned(statement) else "not plain"
            raise Missed(f"a statement between the head and the loss: {used}", statement, Code.USED_OTHERWISE)
        value = self._moved(value)
        popped = POPPED.match(value)
        key = getattr(popped.expression("KEY"), "value", None) if popped else None
        if self._logits.mentioned(value):
            self._bind(statement)
        elif popped is not None and isinstance(key, str):
            self._popped[name] = popped["KEYWORDS"], key, self._known(popped.expression("DEFAULT"))
            self._left_out.append(statement)
        else:
            self._logits.locals[name] = self._known(value)
            self._logits.held.pop(name, None)
            self._plain.append(statement)

    def _conditional(self, statement: ast.If) -> None:
        """Read ``if cap is not None:`` around steps with ``cap``; upstream handles any other branch."""
        if not self._logits.mentioned(statement):
            raise Missed("a branch between the head and the loss", statement, Code.NO_ROOM)
        try:
            self._logits = _optional(self._logits.copy(), statement)
            self._left_out.append(statement)
        except Missed:
            self._avoid(statement)

    def _avoid(self, statement: ast.stmt, late: Collection[str] = ()) -> None:
        """Add the condition that a call skips this branch; ``late`` names are unknown when the guard runs."""
        if isinstance(statement, ast.If) and not statement.orelse:
            negated = NEGATED.match(statement.test)
            test = negated.expression("TEST") if negated else ast.UnaryOp(ast.Not(), statement.test)
            if is_plain(test) and not self._logits.mentioned(test) and used_names([test]).isdisjoint(late):
                self._conditions.append(self._known(test))
                return
        raise Missed("logits are used in another way", statement, Code.USED_OTHERWISE)

    def _known(self, node: ast.expr) -> ast.expr:
        if not self._popped.keys().isdisjoint(used_names([node])):
            raise Missed(
                f"{ast.unparse(node)} uses a value popped from the keywords", node, Code.OTHER_ARGUMENTS
            )
        return self._logits.known(node)

    def _moved(self, node: ast.expr) -> ast.expr:
        """``x`` for ``x.to(logits.device)``: kernels move labels to the right device."""
        moved = MOVED.match(node)
        return moved.expression("X") if moved and moved["LOGITS"] in self._logits.held else node

    # The loss

    def _argument(self, name: str) -> ast.expr:
        if name not in self._given:
            raise Missed(f"the loss is called without {name}", self._call, Code.OTHER_ARGUMENTS)
        return self._given[name]

    def _operands(self) -> tuple[ast.expr, ast.expr, tuple[ast.keyword, ...]]:
        if len(self._call.args) > 3 or any(isinstance(given, ast.Starred) for given in self._call.args):
            raise Missed(
                "the loss is called with other positional arguments", self._call, Code.OTHER_ARGUMENTS
            )
        others = [keyword for keyword in self._call.keywords if keyword.arg not in _OPERANDS]
        labels, vocabulary = self._moved(self._argument(_LABELS)), self._argument(_VOCABULARY)
        width = WIDTH.match(vocabulary)
        if width is not None and width["LOGITS"] in self._logits.held and self._logits.head is not None:
            # 0 for a head without a width: no kernel runs, as the logits are not its.
            asked = [self._logits.head.func, ast.Constant("out_features"), ast.Constant(0)]
            vocabulary = ast.Call(ast.Name("getattr", ast.Load()), asked, [])
        return self._known(labels), self._known(vocabulary), tuple(self._keywords(others))

    def _keywords(self, given: Sequence[ast.keyword]) -> Iterator[ast.keyword]:
        forwarded = {chain(keyword.value) for keyword in given if keyword.arg is None}
        for keyword in given:
            popped = self._popped.get(chain(keyword.value))
            if popped is None:
                yield ast.keyword(arg=keyword.arg, value=self._known(keyword.value), lineno=keyword.lineno)
                continue
            keywords, key, default = popped
            if keyword.arg != key or keywords not in forwarded:
                raise Missed(
                    f"{key} was popped from {keywords} and is passed as {keyword.arg}",
                    self._call,
                    Code.OTHER_ARGUMENTS,
                )
            yield ast.keyword(arg=key, value=default)

    def _head(self) -> tuple[ast.expr, ast.expr, ast.expr | None]:
        """The head, its argument, and a module that is applied to the argument first."""
        head = self._logits.head
        if head is None:
            raise Missed("no head is called", self._call, Code.OTHER_FORM)
        argument = _only_argument(head)
        before_head = argument.func if isinstance(argument, ast.Call) else None
        if before_head is not None and chain(before_head).startswith("self.") and not is_plain(argument):
            argument = _only_argument(argument)
        else:
            before_head = None
        if not is_plain(argument):
            raise Missed(f"{ast.unparse(argument)} is not plain", argument)
        return head.func, argument, before_head

    # After the loss

    def _after_loss(self, statements: list[ast.stmt], loss: str) -> ast.Call:
        """Read what follows the loss; return the call that creates the output."""
        *rest, end = statements or [self._body[-1]]
        output = end.value if isinstance(end, ast.Return) else None
        name, value = binding(rest[-1]) if rest else ("", None)
        if isinstance(output, ast.Name) and output.id == name:
            output = value
            del rest[-1]
        if not isinstance(output, ast.Call) or not chain(output.func)[:1].isupper():
            raise Missed("the forward does not end by creating an output", end, Code.OTHER_FORM)
        for statement in rest:
            if self._logits.mentioned(statement):
                self._avoid(statement, {loss, *bound_names(self._copied)})
            else:
                self._copied.append(statement)
        return output

    def _returned(self, output: ast.Call) -> tuple[str, tuple[Step, ...]]:
        """The name of the logits in the output, with the steps that were applied to them."""
        found = OUTPUT.match(output)
        others = (
            [each for name in ("ARGUMENTS", "OTHERS") for each in found.bound[name].nodes] if found else []
        )
        if found is None or any(map(self._logits.mentioned, others)):
            raise Missed(
                "the output does not contain the logits, or not only as logits", output, Code.OTHER_FORM
            )
        steps = self._logits.steps(self._argument(_LOGITS))
        if steps is None or self._logits.held.get(found["LOGITS"]) != steps:
            raise Missed("the output and the loss use different logits", output, Code.OTHER_FORM)
        return found["LOGITS"], steps

    def _needed(self, output: ast.Call, bound: set[str]) -> tuple[ast.stmt, ...]:
        """The statements that the guard repeats: those after the loss, and plain ones that they need."""
        copied = self._copied
        needed = used_names([*copied, output])
        for statement in reversed(self._plain):
            if (name := binding(statement)[0]) in needed and name not in bound:
                copied = [statement, *copied]
                needed |= used_names([statement])
        popped_from = {keywords for keywords, _, _ in self._popped.values()}
        lost = (bound_names(self._left_out) | popped_from) & needed
        lost -= {*bound, *(binding(statement)[0] for statement in copied)}
        if lost:
            raise Missed(f"{', '.join(sorted(lost))} is used after the loss", output, Code.USED_OTHERWISE)
        return tuple(copied)


def _optional(logits: Logits, statement: ast.If) -> Logits:
    """The logits after ``if value is not None:``.

    Raises:
        Missed: kernels would not skip what it does to logits for None.
    """
    value, before = compared_with_none(statement.test, ast.IsNot), dict(logits.held)
    if isinstance(value, ast.NamedExpr):
        logits.locals[value.target.id] = logits.known(value.value)
        value = value.value
    if value is None or statement.orelse:
        raise Missed("a branch on something else than None", statement)
    value = logits.known(value)
    for one in statement.body:
        logits.bind(one)
    for name, steps in logits.held.items():
        done = before.get(name)
        if done is None or steps[: len(done)] != done:
            raise Missed(f"{name} are other logits after it", statement)
        logits.held[name] = (*done, *(_only_with(value, step) for step in steps[len(done) :]))
    return logits


def _only_with(value: ast.expr, step: Step) -> Step:
    """The step in a form that is skipped if ``value`` is None."""
    if step.kind == "dtype" and step.operand is not None:
        test = ast.Compare(left=value, ops=[ast.IsNot()], comparators=[ast.Constant(None)])
        return Step("dtype", ast.IfExp(test=test, body=step.operand, orelse=ast.Constant(None)))
    if step.operand is not None and step.code != serialise(value):
        raise Missed(f"it is done with something else than {ast.unparse(value)}", value)
    return step if step.operand is None else replace(step, optional=True)


def _only_argument(call: ast.expr) -> ast.expr:
    if (applied := APPLIED.match(call)) is None:
        raise Missed(f"{ast.unparse(call)[:60]} takes more than hidden states", call, Code.OTHER_ARGUMENTS)
    return applied.expression("STATES")
