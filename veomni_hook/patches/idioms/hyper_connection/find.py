"""Hyper-connections: a class whose ``forward`` is one of the formulas of the kernels' reference.

A kernel computes the norm of the streams itself, so ``__init__`` must create it from a class of the file that
is an RMSNorm without weight; the guard passes the module and its class, which are checked at every call.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial

from veomni_hook.patches.code.document import FunctionNode
from veomni_hook.patches.code.tree import own_attribute, walk_ast
from veomni_hook.patches.graph import ARGUMENT, ATTRIBUTE, NUMBER, digest, reference_form, source
from veomni_hook.patches.idioms.rms_norm import find as find_rms_norms
from veomni_hook.patches.idioms.shared import formula_of
from veomni_hook.patches.routes.guards import ask, before_body
from veomni_hook.patches.routes.view import ModuleView, called_otherwise, defining, initialised_by
from veomni_hook.patches.site import Code, Missed, Site, Status, skipped_at_calls, slot_name
from veomni_hook.patterns import pattern_file

__all__ = ["CANDIDATES", "OP", "PART", "WORDS", "find"]

OP = "hyper_connection"
PART = "weights"
WORDS = "HyperConnection | HyperHead | hc_mult | hc_count"
CANDIDATES = (
    "every forward of a class whose name contains HyperConnection or HyperHead, or that reads self.hc_mult or"
    " self.hc_count (part weights)"
)

_NAME = re.compile("Hyper(Connection|Head)")
_SIZES = ("hc_mult", "hc_count")
_NAMES = ("sinkhorn", "sinkhorn__viewed", "collapse")
_RULES = {
    "hidden_streams": ARGUMENT,
    "norm": ATTRIBUTE,
    "fn": ATTRIBUTE,
    "base": ATTRIBUTE,
    "scale": ATTRIBUTE,
    "streams": NUMBER,
    "iterations": NUMBER,
    "eps": NUMBER,
}
#: Of float32 values, both are the same.
_NORMS = ("unweighted", "unweighted_rounded_scale")


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for owner, forward in view.forwards():
        attributes = (node for node in walk_ast(forward) if isinstance(node, ast.Attribute))
        if _NAME.search(owner.name) or any(own_attribute(node) in _SIZES for node in attributes):
            try:
                yield _routed(view, owner, forward)
            except Missed as missed:
                target = f"{owner.name}.forward"
                yield Site(OP, target, Status.MISSED, reason=missed.reason, part=PART, lineno=forward.lineno)


def _routed(view: ModuleView, owner: ast.ClassDef, forward: FunctionNode) -> Site:
    form, name, matched = formula_of(OP, view, owner, forward, _RULES, names=_NAMES)
    text = partial(source, receiver=form.receiver)
    norm = _norm(view, owner, text(matched.bindings["norm"]))
    kind = norm.target.partition(".")[0]
    names = reference_form(pattern_file(OP), name).arguments
    operands = {key: kind if key == "norm_class" else text(matched.bindings[key]) for key in names}
    variant, target = name.partition("__")[0], f"{owner.name}.forward"
    code = ask(forward, slot_name(OP, variant), form.receiver, list(operands.values()))
    return Site.asking(
        OP,
        target,
        variant,
        forward,
        before_body(view, forward, code, f"{OP}/{variant}"),
        form=digest(form),
        captures=operands,
        relies_on=tuple(dict.fromkeys((*form.inlined, norm.target, *norm.relies_on))),
        skips={target: tuple(dict.fromkeys((*form.inlined, *skipped_at_calls(norm))))},
        part=PART,
    )


def _norm(view: ModuleView, owner: ast.ClassDef, norm: str) -> Site:
    """The site of the class of ``norm``, code for an attribute.

    Raises:
        Missed: kernels do not compute it.
    """
    attribute = own_attribute(ast.parse(norm, mode="eval").body)
    values = [value for name, value in initialised_by(view, owner) if name == attribute]
    names = {
        value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
        for value in values
    }
    if len(names) != 1 or not names <= view.classes.keys():
        raise Missed(f"{norm} is not created from one class of the file", code=Code.UNKNOWN_MODULE)
    (name,) = names
    if defining(view, name) != name:
        raise Missed(f"{name} inherits its forward", code=Code.OTHER_FORM)
    sites = {site.target: site for site in view.sites(find_rms_norms)}
    site = sites.get(f"{name}.forward")
    if site is None or site.status is not Status.ROUTED or site.variant not in _NORMS:
        raise Missed(f"{name} is not an RMSNorm without weight", code=Code.OTHER_FORM)
    if site.captures["eps"] != "self.eps":
        raise Missed(f"the eps of {name} is {site.captures['eps']}", code=Code.OTHER_SETTING)
    if other := called_otherwise(view, name):
        raise Missed(other)
    return site
