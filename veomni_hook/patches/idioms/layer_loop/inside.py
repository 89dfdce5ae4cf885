"""What changes inside of layers that run on a part of the positions: arguments, and what attention gets."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.idioms.layer_loop.queries import Queries
from veomni_hook.patches.routes.guards import before_body, before_statement, in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Site, Status

__all__ = ["IMPORT", "NOT_HERE", "OP", "Inside", "quoted"]

OP = "layer_loop"
#: The comment above a statement that refuses a pass.
NOT_HERE = "sequence parallelism: not for this model"
_WHOLE_KEYS = "sequence parallelism: this rank's queries, the keys of all positions"
IMPORT = ("veomni_hook.parallel", "sequence as veomni_sequence")
_KEYS = ("veomni_hook.parallel", "whole_keys as veomni_keys")


@dataclass(frozen=True)
class Inside:
    """What the layers of a file's models need.

    Attributes:
        masks: arguments of calls that must be a part of a mask of padding, by their identity.
        queries: methods of attention that get the keys of all positions, by their identity.
        refusals: where branches begin that are refused when they run, by identity, and why.
    """

    masks: dict[int, ast.expr] = field(default_factory=dict)
    queries: dict[int, Queries] = field(default_factory=dict)
    refusals: dict[int, tuple[ast.stmt, str]] = field(default_factory=dict)

    def sites(self, view: ModuleView) -> Iterator[Site]:
        """The sites of the methods that change."""
        for owner in view.classes.values() if self.masks or self.queries or self.refusals else ():
            for name, method in view.methods(owner).items():
                site = partial(Site, OP, f"{owner.name}.{name}", Status.ROUTED, counted=False)
                expressions = [
                    node for node in walk_ast(method) if isinstance(node, ast.expr) and id(node) in self.masks
                ]
                if expressions:
                    parts = [
                        in_place(view, part, f"veomni_sequence.part_of_rows(self, {ast.unparse(part)})")
                        for part in expressions
                    ]
                    line = expressions[0].lineno
                    yield site("part_of_rows", edits=tuple(parts), lineno=line, imports=(IMPORT,))
                for statement in walk_ast(method) if self.refusals else ():
                    if id(statement) in self.refusals:
                        first, reason = self.refusals[id(statement)]
                        code = f"veomni_sequence.refused_inside(self, {quoted(reason)})"
                        edits = before_statement(view, method, first, code, NOT_HERE)
                        yield site("refused_inside", edits=edits, lineno=first.lineno, imports=(IMPORT,))
                if (queries := self.queries.get(id(method))) is not None:
                    receiver, hidden = (argument.arg for argument in method.args.args[:2])
                    names = ", ".join(filter(None, (queries.cache, queries.mask, queries.positions)))
                    code = f"{names} = veomni_keys.whole_keys({receiver}, {hidden}, {names})"
                    edits = before_body(view, method, code, _WHOLE_KEYS)
                    yield site("whole_keys", edits=edits, lineno=method.lineno, imports=(_KEYS,))


def quoted(reason: str) -> str:
    """A reason as code."""
    return json.dumps(reason, ensure_ascii=False)
