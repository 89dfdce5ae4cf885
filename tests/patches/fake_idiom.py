"""An idiom for tests: `forward` methods that name `scale`, distinguished only by their operators."""

import ast
from collections.abc import Iterator
from types import ModuleType

from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status

OP = "scaling"
CANDIDATES = "a forward that uses scale"
SALT = ""  # another value simulates another release of this package
VARIANTS = {"Mult": "times", "Add": "plus"}


def find(view: ModuleView) -> Iterator[Site]:
    """A site for each forward with `scale`: routed, unbound without `self`, missed if it divides."""
    for owner, forward in view.forwards():
        text = view.text(forward)
        if "boom" in text:
            raise RuntimeError("the idiom met boom")
        if "scale" not in text:
            continue
        operators = [type(n.op).__name__ for n in ast.walk(forward) if isinstance(n, ast.BinOp)]
        status, reason = Status.ROUTED, Reason("")
        if "Div" in operators:
            status = Status.MISSED
            reason = Reason("nearest times: expected Mult, found Div", Code.OTHER_FORM, forward.lineno)
        elif forward.args.args[0].arg != "self":
            status, reason = Status.UNBOUND, Reason("no module at hand", Code.NO_OWNER)
        start = view.document.start(forward)
        yield Site(
            OP,
            f"{owner.name}.forward",
            status,
            variant="" if status is Status.MISSED else next(VARIANTS[o] for o in VARIANTS if o in operators),
            reason=reason,
            form=SALT + "-".join(operators),
            edits=(Edit(start, start, ""),) if status is Status.ROUTED and "Whole" not in owner.name else (),
            counted="call" not in owner.name.lower(),
            part="firsts" if owner.name.startswith("First") else "",
            lineno=forward.lineno,
        )


def module() -> ModuleType:
    """The idiom as a module, as the recogniser expects it."""
    found = ModuleType("veomni_hook.patches.idioms.scaling")
    found.OP, found.CANDIDATES, found.find = OP, CANDIDATES, find
    return found
