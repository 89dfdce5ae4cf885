"""A residual addition followed by an RMSNorm of the sum: two or three statements, computed by one kernel.

    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.norm(hidden_states)

``self.norm`` is a module that ``__init__`` creates from a class of the same file, whose ``forward`` is one of
the formulas of `veomni_hook.kernels.add_rms_norm`. A kernel skips the call of that module, so the guard
passes the module and the class to the slot, which checks at every call that the object is a plain instance
of the class. If no kernel is used, upstream's statements run unchanged in the guard's ``else``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.scope import free_name, local_names
from veomni_hook.patches.code.statement_runs import Run, at_hand, simple_target
from veomni_hook.patches.code.tree import blocks, own_attribute, walk_ast
from veomni_hook.patches.graph import variant_names
from veomni_hook.patches.idioms.rms_norm import find as find_rms_norms
from veomni_hook.patches.idioms.shared import gathered, has_self
from veomni_hook.patches.routes.guards import guard
from veomni_hook.patches.routes.view import ModuleView, called_otherwise, defining, initialised_by
from veomni_hook.patches.site import Code, Missed, Site, Status, skipped_at_calls, slot_name

__all__ = ["CANDIDATES", "OP", "WORDS", "Added", "added_runs", "find", "guarded"]

OP = "add_rms_norm"
WORDS = "RMSNorm | mean( rsqrt( | mean( pow("
CANDIDATES = (
    "every method that assigns a sum to a name and in the next statement, or after one that copies the name, "
    "calls one of its own RMSNorms with it: a module that __init__ creates from a class of the file whose "
    "name contains RMSNorm, or which is a candidate of rms_norm"
)


@dataclass(frozen=True)
class Added:
    """A run that adds and normalises: the norm's attribute, and the names that hold the sum."""

    run: Run
    attribute: str
    total: str
    copy: str | None

    @property
    def lineno(self) -> int:
        """The line of the sum."""
        return self.run.statements[0].lineno

    def assigned(self, normalised: str, call: str) -> list[ast.stmt]:
        """Statements that assign the run's names from ``call``, which returns the sum and its norm."""
        sums = [name for name in (self.total, self.copy) if name not in (None, normalised)]
        if not sums:
            return ast.parse(f"{normalised} = {call}[1]").body
        copies = [f"{name} = {sums[0]}" for name in sums[1:] if name != sums[0]]
        return ast.parse("\n".join([f"{sums[0]}, {normalised} = {call}", *copies])).body


def added_runs(method: FunctionNode) -> Iterator[Added]:
    """Every sum that is passed to a module of ``self``, in text order."""
    for block in blocks(method):
        for first, statement in enumerate(block):
            total = _sum(statement)
            rest = block[first + 1 : first + 3] if total is not None else []
            if total is None or not rest:
                continue
            copy = simple_target(rest[0]) if _is_name(getattr(rest[0], "value", None), total) else None
            last = first + (1 if copy is None else 2)
            attribute = _called(block[last], total) if last < len(block) else None
            if attribute is not None:
                yield Added(Run(method, block, first, last), attribute, total, copy)


def _called(statement: ast.stmt, total: str) -> str | None:
    """The attribute of ``self`` that a statement calls with ``total`` as the first argument."""
    for node in walk_ast(statement):
        if isinstance(node, ast.Call) and node.args and _is_name(node.args[0], total):
            if attribute := own_attribute(node.func):
                return attribute
    return None


def _sum(statement: ast.stmt) -> str | None:
    """The name that a statement assigns a sum to."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        return statement.target.id if isinstance(statement.target, ast.Name) else None
    value = getattr(statement, "value", None)
    is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
    return simple_target(statement) if is_sum else None


def _is_name(node: object, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


_OPERANDS = ("weight", "eps")
#: A class of norms, and the site of its forward; None for a class that is no candidate.
_Kind = tuple[str, Site | None]


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    normalising = {site.target.partition(".")[0] for site in view.sites(find_rms_norms)}
    normalising.update(name for name in view.classes if "RMSNorm" in name)
    if not normalising:
        return
    for target, owner, method in view.every_method():
        if method.name != "__init__" and has_self(method) and (runs := list(added_runs(method))):
            norms = _norms(view, owner)
            if runs := [added for added in runs if added.attribute in norms]:
                yield _site(view, target, method, runs, norms)


def _norms(view: ModuleView, owner: ast.ClassDef) -> dict[str, list[_Kind]]:
    """The attributes that are RMSNorms of this file, with the classes that ``__init__`` creates them from."""
    class_names: dict[str, set[str]] = {}
    for attribute, value in initialised_by(view, owner):
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in view.classes:
            class_names.setdefault(attribute, set()).add(value.func.id)
    sites = {site.target: site for site in view.sites(find_rms_norms)} if class_names else {}
    kinds = {
        attribute: [(name, sites.get(f"{defining(view, name)}.forward")) for name in sorted(names)]
        for attribute, names in class_names.items()
    }
    return {
        attribute: every
        for attribute, every in kinds.items()
        if all(site is not None or "RMSNorm" in name for name, site in every)
    }


def _site(
    view: ModuleView, where: str, method: FunctionNode, runs: list[Added], norms: Mapping[str, list[_Kind]]
) -> Site:
    routed, reasons = gathered(runs, partial(_routed, view, method, norms))
    if not routed:
        return Site(OP, where, Status.MISSED, reason=reasons[0], lineno=runs[0].lineno)
    sites = [site for _, site, _ in routed]
    return Site.asking(
        OP,
        where,
        list(dict.fromkeys(site.variant for site in sites)),
        runs[0],
        [edit for *_, edits in routed for edit in edits],
        reason="; ".join(reasons),
        form="|".join(site.form for site in sites),
        captures={"norm": ", ".join(dict.fromkeys(name for name, *_ in routed))},
        relies_on=tuple(dict.fromkeys(name for site in sites for name in (site.target, *site.relies_on))),
        skips={where: tuple(dict.fromkeys(name for site in sites for name in skipped_at_calls(site)))},
    )


def _routed(
    view: ModuleView, method: FunctionNode, norms: Mapping[str, list[_Kind]], added: Added
) -> tuple[str, Site, tuple[Edit, ...]]:
    """The class of a run's norm, the site of its forward, and the guard.

    Raises:
        Missed: no kernel computes this norm with the sum, or the code does not allow a guard.
    """
    kinds = norms[added.attribute]
    if len(kinds) > 1:
        names = ", ".join(name for name, _ in kinds)
        raise Missed(f"self.{added.attribute} may be one of {names}", added, Code.UNKNOWN_MODULE)
    name, site = kinds[0]
    if site is None or site.status is not Status.ROUTED:
        why = view.scope.why_refused(defining(view, name))
        raise Missed(f"{name} has no formula of rms_norm{why}", added, Code.NO_FUSED_FORM)
    if site.variant not in variant_names(OP):
        said = f"{name} is {site.variant}, which has no form with an addition"
        raise Missed(said, added, Code.NO_FUSED_FORM)
    if other := called_otherwise(view, name):
        raise Missed(other, added)
    forward = view.methods(view.classes[defining(view, name)])["forward"]
    if any(isinstance(node, ast.Raise | ast.Assert) for node in walk_ast(forward)):
        raise Missed(f"{name} checks its arguments", added, Code.NO_FUSED_FORM)
    own = [own_attribute(ast.parse(site.captures[operand], mode="eval").body) for operand in _OPERANDS]
    for operand, attribute in zip(_OPERANDS, own, strict=True):
        if not attribute:
            said = f"the {operand} of {name} is {site.captures[operand]}"
            raise Missed(said, added, Code.OTHER_SETTING)
    return name, site, guarded(view, method, added, (OP, site.variant), own, name)


def guarded(
    view: ModuleView,
    method: FunctionNode,
    added: Added,
    slot: tuple[str, str],
    own: Sequence[str] = (),
    class_name: str = "",
) -> tuple[Edit, ...]:
    """The guard for a run.

    Args:
        view: the module.
        method: the method around the run.
        added: the run.
        slot: that of an op and a variant.
        own: the attributes of the norm that follow the summands as operands; without any, the norm itself.
        class_name: the norm's class, if the slot compares it.

    Raises:
        Missed: the code does not allow one.
    """
    total, call = (getattr(added.run.statements[place], "value", None) for place in (0, -1))
    normalised = simple_target(added.run.statements[-1])
    if isinstance(added.run.statements[0], ast.AugAssign) or not isinstance(total, ast.BinOp):
        raise Missed("the sum is made in place", added, Code.IN_PLACE)
    is_norm = isinstance(call, ast.Call) and own_attribute(call.func) == added.attribute
    if normalised is None or call is None or not is_norm or not _is_name(call.args[0], added.total):
        raise Missed("the normalised sum is part of an expression", added, Code.NO_ROOM)
    if len(call.args) > 1 or call.keywords:
        raise Missed("the norm is called with more than the sum", added, Code.OTHER_ARGUMENTS)
    local = local_names(method)
    tensors = [name for side in (total.left, total.right) if (name := at_hand(side)) in local - {"self"}]
    if not tensors or class_name in local:
        said = "no summand is a local known before the sum"
        said += ", or a local hides the norm's class" if class_name else ""
        raise Missed(said, added, Code.NO_ROOM)
    kernel, module = free_name(method, "kernel"), free_name(method, "norm")
    operands = [f"{module}.{attribute}" for attribute in own] or [module]
    arguments = [ast.unparse(total.left), ast.unparse(total.right), *operands]
    answer = added.assigned(normalised, f"{kernel}({', '.join(arguments)})")
    asked = ["self", tensors[0], tensors[-1], f"{module} := {ast.unparse(call.func)}"]
    asked += [class_name] if class_name else []
    comment = f"{'/'.join(slot)}: the sum and its norm"
    edits = guard(view, added.run, slot_name(*slot), asked, answer, comment, returns=False)
    if not edits:
        raise Missed("the code around it does not allow a guard here", added, Code.NO_ROOM)
    return edits
