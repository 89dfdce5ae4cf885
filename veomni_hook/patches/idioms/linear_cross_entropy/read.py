"""Read the end of a language model's ``forward``, from the head to the output.

Logits may only be transformed elementwise, passed to one loss and put into the output. Code before the loss
must be plain; code after it may do anything that does not use logits. A branch that uses logits otherwise is
allowed if its test can be evaluated beforehand.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from veomni_hook.patches.code.comparison import serialise
from veomni_hook.patches.code.scope import bound_names, used_names
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.code.tree import (
    binding,
    chain,
    compared_with_none,
    contains,
    is_plain,
    last_name,
    substituted,
)
from veomni_hook.patches.idioms.linear_cross_entropy.logits import (
    FLOAT32,
    STEPS,
    Step,
    is_not_none,
    only_with,
    options,
)
from veomni_hook.patches.site import Code, Missed

__all__ = ["Reader", "Tail", "passes_vocabulary"]

MOVED = Template("X.to(LOGITS.device)", names="LOGITS")
POPPED = Template("KEYWORDS.pop(KEY, DEFAULT)", names="KEYWORDS")
WIDTH = Template("LOGITS.shape[-1]", names="LOGITS")
NEGATED = Template("not TEST")
#: A head takes hidden states, or what a module in front of it makes of them.
HEADS = (Template("HEAD(STATES)"), Template("HEAD(BEFORE(STATES))"))
END = Template(
    """
if either:
    return OUTPUT(*ARGUMENTS, logits=LOGITS, **OTHERS)
else:
    MADE = OUTPUT(*ARGUMENTS, logits=LOGITS, **OTHERS)
    return MADE
""",
    names="LOGITS",
)
_OPERANDS = _LOGITS, _LABELS, _VOCABULARY = ("logits", "labels", "vocab_size")
_OTHERWISE = "logits are used in another way"


@dataclass(frozen=True, slots=True)
class Tail:
    """What a guard needs to know.

    Attributes:
        statement: the statement that calls the head; the guard is inserted before it.
        conditions: tests that must all hold.
        numbers: tests that the numbers which scale logits are not None.
        loss: the name that the loss is bound to.
        logits: the name of the logits in ``output``.
        operands: what the kernel gets, by name, other than the following.
        keywords: other keywords of the loss; one without a position is overridden by the caller's.
        transform: the steps applied to logits, as options of the kernel.
        before_head: a module that is applied to hidden states in the argument of the head.
        copied: the statements that the guard repeats: those between the loss and the output, and plain ones
            from before that these need.
        output: the call that creates the output.
    """

    statement: ast.stmt
    conditions: Sequence[ast.expr]
    numbers: Sequence[ast.expr]
    loss: str
    logits: str
    operands: Mapping[str, ast.expr]
    keywords: Sequence[ast.keyword]
    transform: Mapping[str, ast.expr]
    before_head: ast.expr | None
    copied: Sequence[ast.stmt]
    output: ast.Call


def passes_vocabulary(call: ast.Call) -> bool:
    """Whether a loss gets a vocabulary size, as the loss of a language model does."""
    if any(keyword.arg == _VOCABULARY for keyword in call.keywords):
        return True
    return len(call.args) > 2 and last_name(call.args[2]).endswith("_size")


class Reader:
    """Reads each statement from the head to the output once.

    Args:
        call: the only call of ``self.loss_function`` in a ``forward``; it passes a vocabulary size.
        resolve: returns the full name of an expression according to the module's imports, or nothing.
        cap: returns the operand of ``capped_by`` for a called module that only caps logits, or None.
    """

    def __init__(
        self,
        call: ast.Call,
        resolve: Callable[[ast.expr], str],
        cap: Callable[[ast.expr], ast.expr | None],
    ) -> None:
        self._call = call
        self._given = dict(zip(_OPERANDS, call.args, strict=False))
        self._given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in _OPERANDS}
        self._resolve = resolve
        self._cap = cap
        self._head: ast.Call | None = None
        # The names that hold logits, with the steps applied to them.
        self._logits: dict[str, tuple[Step, ...]] = {}
        # Names bound since then to other values, in terms of names from before the head.
        self._locals: dict[str, ast.expr] = {}
        # The statements that bind plain values, and the names that the others bind.
        self._plain: list[ast.stmt] = []
        self._left_out: set[str] = set()
        self._conditions: list[ast.expr] = []
        self._numbers: dict[str, ast.expr] = {}

    def read(self, body: list[ast.stmt]) -> Tail:
        """Read the body of the ``forward``.

        Raises:
            Missed: something is not understood.
        """
        at = self._at(body)
        branch = body[at]
        inside = branch.body if isinstance(branch, ast.If) else [branch]
        at_call = self._at(inside)
        loss, value = binding(inside[at_call])
        if value is not self._call:
            said = "the loss is computed in a nested branch, or not bound to a name"
            raise Missed(said, self._call, Code.NO_ROOM)
        origin = self._origin(body[:at])
        for statement in body[origin:at]:
            self._before_loss(statement)
        if isinstance(branch, ast.If):
            self._conditions.insert(0, self._known(branch.test))
        for statement in inside[:at_call]:
            self._before_loss(statement)
        operands, keywords = self._operands(), [*self._keywords()]
        copied, end = self._after_loss([*inside[at_call + 1 :], *body[at + 1 :]] or body[-1:], loss)
        logits, output = end["LOGITS"], getattr(end.first, "value")  # noqa: B009
        steps = self._steps(self._argument(_LOGITS))
        if steps is None or self._logits.get(logits) != steps:
            raise Missed("the output and the loss use different logits", output, Code.OTHER_FORM)
        transform = options(steps, output)
        head, before_head, hidden_states = self._modules()
        return Tail(
            statement=body[origin],
            conditions=self._conditions,
            numbers=[*self._numbers.values()],
            loss=loss,
            logits=logits,
            operands={"hidden_states": hidden_states, "head": head, **operands},
            keywords=keywords,
            transform=transform,
            before_head=before_head,
            copied=self._with_needed(copied, output, {loss, logits}),
            output=output,
        )

    def _at(self, block: Sequence[ast.stmt]) -> int:
        for index, statement in enumerate(block):
            if contains(statement, self._call):
                return index
        raise Missed("the loss is computed in an else", self._call, Code.NO_ROOM)

    def _origin(self, before: Sequence[ast.stmt]) -> int:
        """The index of the statement that the loss's first argument comes from."""
        logits = self._argument(_LOGITS)
        if not isinstance(logits, ast.Name):
            said = f"the loss is not computed from logits but from {ast.unparse(logits)}"
            raise Missed(said, logits, Code.OTHER_FORM)
        for index, statement in reversed([*enumerate(before)]):
            name, value = binding(statement)
            if value is not None and name == logits.id:
                if name not in used_names([value]):
                    return index
            elif logits.id in bound_names([statement]) and not isinstance(statement, ast.If):
                said = f"{logits.id} is bound in a {type(statement).__name__.lower()}"
                raise Missed(said, statement, Code.NO_ROOM)
        raise Missed(
            f"{logits.id} does not come from a statement of the forward itself", logits, Code.NO_ROOM
        )

    # Before the loss

    def _before_loss(self, statement: ast.stmt) -> None:
        """Read a statement that binds a name, or a branch."""
        if isinstance(statement, ast.If):
            self._branch(statement)
            return
        name, value = binding(statement)
        if value is None:
            used = _OTHERWISE if self._uses_logits(statement) else "not plain"
            raise Missed(f"a statement between the head and the loss: {used}", statement, Code.USED_OTHERWISE)
        value = self._moved(value)
        popped = POPPED.match(value)
        if self._head is None or self._uses_logits(value):
            self._transform(statement)
            self._left_out.add(name)
        elif popped is not None and isinstance(popped.expression("KEY"), ast.Constant):
            self._known(popped.expression("DEFAULT"))
            self._locals[name] = substituted(value, self._locals)
            self._left_out |= {name, popped["KEYWORDS"]}
        else:
            self._locals[name] = self._known(value)
            self._logits.pop(name, None)
            self._plain.append(statement)

    def _transform(self, statement: ast.stmt) -> None:
        """Read a statement that computes logits or changes them, and does nothing else."""
        name, value = binding(statement)
        steps = None if value is None else self._steps(value)
        if value is not None and self._head is None:
            said = f"logits come from {ast.unparse(value)[:60]}, where no head is called"
            raise Missed(said, statement, Code.OTHER_FORM)
        if steps is None:
            raise Missed(_OTHERWISE, statement, Code.USED_OTHERWISE)
        self._logits[name] = steps
        self._locals.pop(name, None)

    def _steps(self, node: ast.expr) -> tuple[Step, ...] | None:
        """The steps that an expression applies to logits; None if it is not understood."""
        if isinstance(node, ast.Name):
            return self._logits.get(node.id)
        if self._head is None and isinstance(node, ast.Call):
            if chain(node.func).startswith("self.") and self._cap(node.func) is None:
                self._head = node
                return ()
        for kind, template in STEPS:
            if (match := template.match(node, self._resolve)) is None:
                continue
            operand: ast.expr | None = FLOAT32 if kind == "dtype" else None
            if "OPERAND" in match.bound:
                operand = self._operand(kind, match.expression("OPERAND"))
                if operand is None:
                    continue
            steps = self._steps(match.expression("LOGITS"))
            return (*steps, Step(kind, operand)) if steps is not None and kind else steps
        return None

    def _operand(self, kind: str, node: ast.expr) -> ast.expr | None:
        """The operand of a step; None if the code in its place is none."""
        if self._uses_logits(node):
            return None
        if kind == "capped_by":
            return self._cap(node)
        if kind == "dtype":
            return node if self._resolve(node).startswith("torch.") else None
        number = self._known(node)
        if not isinstance(number, ast.Constant):
            self._numbers[serialise(number)] = is_not_none(number)
        return number

    def _branch(self, statement: ast.If) -> None:
        """Read ``if cap is not None:`` around steps with ``cap``; upstream handles any other branch."""
        if not self._uses_logits(statement):
            raise Missed("a branch between the head and the loss", statement, Code.NO_ROOM)
        logits, known, numbers = dict(self._logits), dict(self._locals), dict(self._numbers)
        try:
            self._optional(statement)
            self._left_out |= bound_names([statement])
        except Missed:
            self._logits, self._locals = logits, known
            self._avoid(statement)
        self._numbers = numbers

    def _optional(self, statement: ast.If) -> None:
        """Read steps with a value that upstream does if the value is not None, as kernels do.

        Raises:
            Missed: kernels would do something else.
        """
        value = compared_with_none(statement.test, ast.IsNot)
        if isinstance(value, ast.NamedExpr):
            self._locals[value.target.id] = self._known(value.value)
            value = value.value
        if value is None or statement.orelse:
            raise Missed("a branch on something else than None", statement)
        value = self._known(value)
        for one in statement.body:
            name, _ = binding(one)
            done = self._logits.get(name)
            self._transform(one)
            steps = self._logits[name]
            if done is None or steps[: len(done)] != done:
                raise Missed(f"{name} are other logits", one)
            self._logits[name] = (*done, *(only_with(value, step) for step in steps[len(done) :]))

    def _avoid(self, statement: ast.stmt, late: Collection[str] = ()) -> None:
        """Add the condition that a call skips this branch; ``late`` names are unknown when the guard runs."""
        if isinstance(statement, ast.If) and not statement.orelse:
            negated = NEGATED.match(statement.test)
            test = negated.expression("TEST") if negated else ast.UnaryOp(ast.Not(), statement.test)
            if is_plain(test) and not self._uses_logits(test) and used_names([test]).isdisjoint(late):
                self._conditions.append(self._known(test))
                return
        raise Missed(_OTHERWISE, statement, Code.USED_OTHERWISE)

    def _uses_logits(self, node: ast.AST) -> bool:
        return not self._logits.keys().isdisjoint(used_names([node]))

    def _known(self, node: ast.expr) -> ast.expr:
        """A plain expression in terms of names from before the head."""
        if self._uses_logits(node) or not is_plain(node):
            raise Missed(f"{ast.unparse(node)} is not plain", node)
        known = substituted(node, self._locals)
        if not is_plain(known):
            said = f"{ast.unparse(node)} uses a value popped from the keywords"
            raise Missed(said, node, Code.OTHER_ARGUMENTS)
        return known

    def _moved(self, node: ast.expr) -> ast.expr:
        """``x`` for ``x.to(logits.device)``: kernels move labels to the right device."""
        moved = MOVED.match(node)
        return moved.expression("X") if moved and moved["LOGITS"] in self._logits else node

    # The loss

    def _argument(self, name: str) -> ast.expr:
        if name not in self._given:
            raise Missed(f"the loss is called without {name}", self._call, Code.OTHER_ARGUMENTS)
        return self._given[name]

    def _operands(self) -> dict[str, ast.expr]:
        if len(self._call.args) > 3 or any(isinstance(argument, ast.Starred) for argument in self._call.args):
            said = "the loss is called with other positional arguments"
            raise Missed(said, self._call, Code.OTHER_ARGUMENTS)
        labels, vocabulary = self._moved(self._argument(_LABELS)), self._argument(_VOCABULARY)
        if (width := WIDTH.match(vocabulary)) is not None and width["LOGITS"] in self._logits:
            # 0 for a head without a width: no kernel runs, as the logits are not its.
            asked = [self._modules()[0], ast.Constant("out_features"), ast.Constant(0)]
            vocabulary = ast.Call(ast.Name("getattr", ast.Load()), asked, [])
        return {_LABELS: self._known(labels), _VOCABULARY: self._known(vocabulary)}

    def _keywords(self) -> Iterator[ast.keyword]:
        others = [keyword for keyword in self._call.keywords if keyword.arg not in _OPERANDS]
        forwarded = {chain(keyword.value) for keyword in others if keyword.arg is None}
        passed = {chain(keyword.value) for keyword in others}
        for name, value in self._locals.items():
            # The guard runs before the statement that pops: the kernel would still get the value.
            popped = POPPED.match(value)
            if popped is not None and popped["KEYWORDS"] in forwarded and name not in passed:
                said = f"{popped['KEY']} is popped from {popped['KEYWORDS']} and not passed to the loss"
                raise Missed(said, self._call, Code.OTHER_ARGUMENTS)
        for keyword in others:
            popped = POPPED.match(self._locals.get(chain(keyword.value), keyword.value))
            if popped is None:
                yield ast.keyword(arg=keyword.arg, value=self._known(keyword.value), lineno=keyword.lineno)
                continue
            key, source = getattr(popped.expression("KEY"), "value", None), popped["KEYWORDS"]
            if keyword.arg != key or source not in forwarded:
                said = f"{key} was popped from {source} and is passed as {keyword.arg}"
                raise Missed(said, self._call, Code.OTHER_ARGUMENTS)
            yield ast.keyword(arg=keyword.arg, value=popped.expression("DEFAULT"))

    def _modules(self) -> tuple[ast.expr, ast.expr | None, ast.expr]:
        """The head, a module in front of it or None, and what goes in."""
        assert self._head is not None  # noqa: S101 - the first statement calls it
        for match in (template.match(self._head) for template in HEADS):
            before = match.expression("BEFORE") if match and "BEFORE" in match.bound else None
            own = before is None or chain(before).startswith("self.")
            if match is not None and own and is_plain(states := match.expression("STATES")):
                return match.expression("HEAD"), before, states
        said = f"{ast.unparse(self._head)[:60]} takes more than hidden states"
        raise Missed(said, self._head, Code.OTHER_ARGUMENTS)

    # After the loss

    def _after_loss(self, statements: Sequence[ast.stmt], loss: str) -> tuple[list[ast.stmt], Found]:
        """Read what follows the loss; return what does not use logits, and the end."""
        end = END.find([statements])
        if not isinstance(end, Found) or not chain(end.bound["OUTPUT"].nodes[0])[:1].isupper():
            said = "the forward does not end by creating an output with the logits"
            raise Missed(said, statements[-1], Code.OTHER_FORM)
        copied: list[ast.stmt] = []
        for statement in statements[: end.index]:
            if self._uses_logits(statement):
                self._avoid(statement, {loss, *bound_names(copied)})
            else:
                copied.append(statement)
        others = (*end.bound["ARGUMENTS"].nodes, *end.bound["OTHERS"].nodes)
        if any(map(self._uses_logits, others)):
            raise Missed("the output contains logits not only as logits", end.first, Code.OTHER_FORM)
        return copied, end

    def _with_needed(
        self, copied: list[ast.stmt], output: ast.Call, bound: Collection[str]
    ) -> list[ast.stmt]:
        """The statements that the guard repeats: ``copied``, and plain ones that they need."""
        needed = used_names([*copied, output])
        for statement in reversed(self._plain):
            if (name := binding(statement)[0]) in needed and name not in bound:
                copied = [statement, *copied]
                needed |= used_names([statement])
        lost = self._left_out & needed - {*bound, *(binding(statement)[0] for statement in copied)}
        if lost:
            raise Missed(f"{', '.join(sorted(lost))} is used after the loss", output, Code.USED_OTHERWISE)
        return copied
