"""Heads that are split in two along their width and joined again: queries and keys of latent attention (MLA).

    q_pass, q_rot = torch.split(q, [m, n], dim=-1)  ->  slot.call(self, torch.split, q, [m, n], -1)
    query_states = torch.cat((q_pass, q_rot), dim=-1)  ->  slot.call(self, torch.cat, (q_pass, q_rot), -1)

Keys may also be joined by two copies into a new tensor; a guard is in front of these. Each call is replaced
by one that computes the same, so nothing depends on what is between them: that a part of a split is joined
again only says that these are heads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeVar

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.statement_runs import Run
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.code.tree import blocks, walk_ast
from veomni_hook.patches.idioms.shared import has_receiver
from veomni_hook.patches.routes.guards import guard, in_place
from veomni_hook.patches.routes.view import Method, ModuleView
from veomni_hook.patches.site import Code, Reason, Site, Status, slot_name

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "head_parts"
WORDS = "torch.split( torch.cat( | torch.split( new_empty( copy_("
CANDIDATES = (
    "every method that splits a tensor in two along the last dimension, by torch.split, and joins one of both"
    " names with another one, by torch.cat or by two copies into a new tensor"
)

_Node = TypeVar("_Node", ast.Assign, ast.Call)
_PARTS = ("FIRST", "SECOND")
_SPLIT = Template("FIRST, SECOND = torch.split(WHOLE, [M, N], dim=-1)", names="WHOLE")
_JOINED = (
    Template("torch.cat((FIRST, SECOND), dim=-1)", names="FIRST SECOND"),
    Template("torch.cat([FIRST, SECOND], dim=-1)", names="FIRST SECOND"),
)
_COPIED = Template(
    """
JOINED = WHOLE.new_empty(*WHOLE.shape[:-1], M + N)
JOINED[..., :M].copy_(FIRST)
JOINED[..., M:].copy_(SECOND)
...
""",
    names="WHOLE FIRST SECOND",
)


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for _, owner, method in view.every_method():
        if has_receiver(method) and "torch.split(" in view.text(method):
            search = _Search(view, owner, method)
            if search.splits:
                yield search.site()


class _Search(Method):
    """Looks for splits in a method, and for what joins their parts."""

    def __init__(self, view: ModuleView, owner: ast.ClassDef, method: FunctionNode) -> None:
        super().__init__(view, owner, method)
        splits = [*self._matches(ast.Assign, _SPLIT)]
        parts = {split[hole] for _, split in splits for hole in _PARTS}
        joined = [*self._matches(ast.Call, *_JOINED)]
        joined = [(call, join) for call, join in joined if parts & {join[hole] for hole in _PARTS}]
        self.joins = [call for call, _ in joined]
        copied = _COPIED.find(blocks(method), view.scope.dotted)
        self.copied = copied if isinstance(copied, Found) and copied["FIRST"] in parts else None
        joins = [join for _, join in joined] + ([self.copied] if self.copied is not None else [])
        again = {join[hole] for join in joins for hole in _PARTS}
        self.splits = [(node, split) for node, split in splits if again & {split[hole] for hole in _PARTS}]

    def site(self) -> Site:
        """The method as a site."""
        line, _ = self.splits[0]
        calls = [("split", split.value) for split, _ in self.splits]
        calls += [("joined", join) for join in self.joins]
        edits = []
        for variant, call in calls:
            assert isinstance(call, ast.Call)  # noqa: S101 - the templates say so
            operands = ", ".join([self.receiver, *map(ast.unparse, (call.func, *call.args)), "-1"])
            edits.append(in_place(self.view, call, f"{slot_name(OP, variant)}.call({operands})"))
        if self.copied is not None:
            guarded = self._guard(self.copied)
            if guarded is None:
                said = f"the code around line {self.copied.first.lineno} cannot be reordered"
                reason = Reason(said, Code.NO_ROOM)
                return Site(OP, self.target, Status.MISSED, reason=reason, lineno=line.lineno)
            edits += guarded
        captures = {split["WHOLE"]: f"{split['FIRST']} | {split['SECOND']}" for _, split in self.splits}
        return Site.asking(OP, self.target, ("split", "joined"), line, edits, captures=captures)

    def _matches(self, kind: type[_Node], *templates: Template) -> Iterator[tuple[_Node, Found]]:
        for node in walk_ast(self.method):
            for template in templates:
                if isinstance(node, kind) and (match := template.match(node, self.view.scope.dotted)):
                    yield node, match

    def _guard(self, copied: Found) -> tuple[Edit, ...] | None:
        assert isinstance(copied.block, list)  # noqa: S101 - a block of the method
        run = Run(self.method, copied.block, copied.index, copied.index + 2)
        first, second, operands = copied["FIRST"], copied["SECOND"], "({FIRST}, {SECOND}), -1, torch.cat"
        operands = operands.format_map(copied)
        answer = ast.parse(f"{copied['JOINED']} = {self.kernel}({operands})").body
        # What torch would broadcast or cast is not joined.
        tests = [
            f"({first}.shape[-1], {second}.shape[-1]) == ({copied['M']}, {copied['N']})",
            f"{first}.dtype is {copied['WHOLE']}.dtype",
        ]
        slot, comment = slot_name(OP, "joined"), f"{OP}/joined: both copies"
        return guard(self.view, run, slot, [self.receiver, operands], answer, comment, tests=tests)
