"""The loss of a language model: the end of a ``forward`` that calls a head and ``self.loss_function``.

The guard is inserted before the statement that calls the head. If its slot has a kernel, the loss is computed
inside the head without materialising all logits, and the forward ends with upstream's own statements and
output; ``logits`` in the output are computed when they are read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b

from veomni_hook.patches.code.comparison import serialise
from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import calls_in, chain, in_text_order, initialised, last_name
from veomni_hook.patches.idioms.linear_cross_entropy.guard import guard, operands
from veomni_hook.patches.idioms.linear_cross_entropy.read import (
    Reader,
    Tail,
    passes_vocabulary,
)
from veomni_hook.patches.idioms.linear_cross_entropy.sequence_classification import pooling_in
from veomni_hook.patches.idioms.load_balancing_loss import find as find_load_balancing_losses
from veomni_hook.patches.routes.guards import before_statement
from veomni_hook.patches.routes.view import ModuleView, linear_otherwise
from veomni_hook.patches.site import Code, Missed, Reason, Site, Status, formula_slot

__all__ = ["CANDIDATES", "NOT_CAUSAL", "OP", "WORDS", "find"]

OP = "linear_cross_entropy"
VARIANT = "next_token"
CAP = Template("def forward(self, LOGITS):\n    return torch.tanh(LOGITS / self.CAP) * self.CAP")
#: Losses that get a vocabulary size, and the others.
PARTS = ("causal_lm", "other_loss")
#: The beginning of the reason for a loss that is not a loss of tokens.
NOT_CAUSAL = "not a causal-LM loss"
WORDS = ".loss_function"
CANDIDATES = (
    "Every method that calls self.loss_function. Those that pass a vocabulary size (keyword vocab_size, or "
    "a third positional argument named *_size) are the causal-LM loss tails (part causal_lm); the others "
    f"(detection, CTC, classification of images: part other_loss) are missed because each is {NOT_CAUSAL}."
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every method that calls ``self.loss_function``, except those that `sequence_classification` lists."""
    for _, owner, method in view.every_method():
        called = calls_in(method) if ".loss_function" in view.text(method) else ()
        calls = in_text_order(call for call in called if chain(call.func) == "self.loss_function")
        if calls and pooling_in(method) is None:
            yield _site(view, owner, method, calls)


def _site(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode, calls: Sequence[ast.Call]) -> Site:
    target = f"{owner.name}.{forward.name}"
    causal = [call for call in calls if passes_vocabulary(call)]
    missed = partial(Site, op=OP, target=target, status=Status.MISSED, part=PARTS[0] if causal else PARTS[1])
    if not causal:
        arguments = [*map(ast.unparse, calls[0].args), *(f"{k.arg}=" for k in calls[0].keywords if k.arg)]
        return missed(
            reason=Reason(f"{NOT_CAUSAL}: it is given {', '.join(arguments)}", Code.OTHER_LOSS),
            lineno=calls[0].lineno,
        )
    try:
        if len(calls) > 1:
            lines = " and ".join(str(call.lineno) for call in calls)
            raise Missed(f"several losses (lines {lines})", code=Code.OTHER_FORM)
        if forward.name != "forward":
            raise Missed("the loss is computed in another method than forward", causal[0], Code.NO_ROOM)
        tail = Reader(causal[0], view.scope.dotted, partial(_cap, view, owner)).read(forward.body)
        head = tail.operands["head"]
        for kind, value in _made(owner, head):
            if other := linear_otherwise(view, kind):
                # No kernel knows what it computes.
                said = f"{chain(head)} is a {kind}, a Linear with a {other} of its own"
                raise Missed(said, value, Code.OTHER_FORM)
        return _routed(view, target, forward, tail)
    except (Missed, ValueError) as error:
        reason = error.reason if isinstance(error, Missed) else Reason(str(error))
        return missed(reason=reason.after(f"nearest is {VARIANT}"), lineno=causal[0].lineno)


def _routed(view: ModuleView, target: str, forward: FunctionNode, tail: Tail) -> Site:
    slot = formula_slot(OP, VARIANT)
    edits: list[Edit] = []
    slots = [slot]
    for other in view.sites(find_load_balancing_losses) if tail.copied else ():
        here = [
            edit
            for node in tail.copied
            for edit in other.edits
            if view.document.start(node) <= edit.start and edit.end <= view.document.end(node)
        ]
        edits += here
        slots += other.slots if here else ()
    code = guard(view, forward, tail, slot.name, edits)
    cap = tail.transform.get("capped_by")
    form = [
        ",".join(tail.transform),
        ",".join(sorted("**" if keyword.arg is None else keyword.arg for keyword in tail.keywords)),
        str(tail.before_head is not None),
        str(len(tail.conditions)),
        serialise(list(tail.copied)),
    ]
    comment = f"{OP}/{VARIANT}: logits are computed when they are read"
    return Site(
        op=OP,
        target=target,
        status=Status.ROUTED,
        variant=VARIANT,
        form=blake2b("\n".join(form).encode(), digest_size=8).hexdigest(),
        captures=operands(view, forward, tail),
        edits=before_statement(view, forward, tail.statement, code, comment),
        slots=tuple(dict.fromkeys(slots)),
        relies_on=(f"{last_name(cap.elts[1])}.forward",) if isinstance(cap, ast.Tuple) else (),
        part=PARTS[0],
        lineno=tail.statement.lineno,
    )


def _made(owner: ast.ClassDef, module: ast.expr) -> list[tuple[str, ast.expr]]:
    """What ``__init__`` may make a module with, and the class."""
    values = (value for name, value in initialised(owner) if f"self.{name}" == chain(module))
    return [(chain(value.func) if isinstance(value, ast.Call) else "", value) for value in values]


def _cap(view: ModuleView, owner: ast.ClassDef, function: ast.expr) -> ast.expr | None:
    """``(self.x, Class, "cap")`` for a module of the file that caps what it gets, and does nothing else."""
    (kind, _), *others = _made(owner, function) or [("", function)]
    forward = view.methods(view.classes[kind]).get("forward") if kind in view.classes and not others else None
    capped = CAP.match(forward, view.scope.dotted) if forward is not None else None
    if capped is None:
        return None
    return ast.Tuple([function, ast.Name(kind, ast.Load()), ast.Constant(capped["CAP"])], ast.Load())
