"""Checks that there are as many features as placeholder tokens: without a value read from a GPU.

    torch_compilable_check(x[mask].numel() == y.numel(), f"{n} tokens, {y.shape[0]} features")
    ->  counts.check(
            torch_compilable_check, counts.selected(x, mask) == y.numel(),
            lambda n=n: f"{n} tokens, {y.shape[0]} features"
        )

Upstream formats the message at every call, which reads the numbers in it, and then reads the condition.
`veomni_hook.multimodal.counts` asserts on the device instead. The message must consist of names, which may be
numbers on the device, and of sizes, which are on the host.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from veomni_hook.patches.code.edit import Edit
from veomni_hook.patches.code.template import Template
from veomni_hook.patches.code.tree import calls_in, child_nodes, last_name, walk_ast
from veomni_hook.patches.code.wrap import WIDTH
from veomni_hook.patches.idioms.shared import gathered
from veomni_hook.patches.routes.guards import in_place
from veomni_hook.patches.routes.view import ModuleView
from veomni_hook.patches.site import Code, Missed, Reason, Site, Status

__all__ = ["CANDIDATES", "OP", "WORDS", "find"]

OP = "count_check"
WORDS = "torch_compilable_check | get_placeholder_mask"
CANDIDATES = (
    "every method and function that passes torch_compilable_check a message with the words tokens and"
    " features or placeholder, or is named get_placeholder_mask and raises an error"
)

_CHECK = "torch_compilable_check"
_METHOD = "get_placeholder_mask"
_VARIANT = "asserted_on_device"
_IMPORT = ("veomni_hook.multimodal", "counts as veomni_counts")
_COUNTED = re.compile(r"\b(features|placeholder)\b")
SELECTION = Template("TENSOR[MASK].numel()", names="TENSOR MASK")
_OPENING = re.compile(r"\s*\((?P<gap>\s*)")
# Attributes and methods of a tensor whose values the host knows.
_SIZES = frozenset(("shape", "size", "numel"))


def find(view: ModuleView) -> Iterator[Site]:
    """Every candidate of a module."""
    for target, _, function in view.every_function():
        calls = [call for call in calls_in(function) if _is_candidate(call)]
        if calls:
            routed, reasons = gathered(calls, partial(_edits, view))
            edits = tuple(edit for edits_of_call in routed for edit in edits_of_call)
            lineno = min(call.lineno for call in calls)
            site = Site(OP, target, Status.MISSED, reason=Reason.joined(reasons), lineno=lineno)
            done = replace(site, status=Status.ROUTED, variant=_VARIANT, edits=edits, imports=(_IMPORT,))
            yield done if edits else site
        elif function.name == _METHOD and any(isinstance(node, ast.Raise) for node in walk_ast(function)):
            reason = Reason("it raises an error itself", Code.OTHER_FORM)
            yield Site(OP, target, Status.MISSED, reason=reason, lineno=function.lineno)


def _is_candidate(call: ast.Call) -> bool:
    if last_name(call.func) != _CHECK or len(call.args) < 2:
        return False
    said = " ".join(
        str(argument.value) for argument in ast.walk(call.args[1]) if isinstance(argument, ast.Constant)
    )
    return "tokens" in said and _COUNTED.search(said) is not None


def _edits(view: ModuleView, call: ast.Call) -> list[Edit]:
    """All edits of a check; raises `Missed` if one of them is not possible."""
    document = view.document
    if call.keywords or len(call.args) != 2:
        raise Missed(
            "the check has other arguments than a condition and a message", call, Code.OTHER_ARGUMENTS
        )
    if not isinstance(call.func, ast.Name) or not view.scope.dotted(call.func).endswith(f".{_CHECK}"):
        raise Missed("the check is not transformers' own", call, Code.REPLACED)
    condition, message = call.args
    opening = _OPENING.match(document.source, document.end(call.func))
    if opening is None or opening.end() != document.start(condition):
        raise Missed("the condition is in brackets, or follows a comment", call, Code.NO_ROOM)
    names = [f"{name}={name}" for name in _numbers(message)]
    start = document.start(message)
    gap = opening["gap"]
    text = f"veomni_counts.check({gap}{call.func.id},{gap or ' '}"
    edits = [Edit(document.start(call.func), opening.end(), text)]
    for node, tensor, mask in _selections(condition):
        edits.append(in_place(view, node, f"veomni_counts.selected({tensor}, {mask})"))
    # A message on its own line keeps it: the line is as long as upstream wrote it.
    before = document.source[document.line_start(start) : start]
    gap = " " if before.strip() else f"\n{before}"
    head = " ".join(["lambda", ", ".join(names)]).rstrip()
    if not before.strip() and len(before) + len(head) >= WIDTH:
        head = f"lambda {f',{gap}       '.join(names)}"
    edits.append(Edit(start, start + 1, f"{head}:{gap}{document.source[start]}"))
    return edits


def _selections(condition: ast.expr) -> Iterator[tuple[ast.expr, str, str]]:
    """The expressions ``x[mask].numel()`` in a comparison of two numbers, with x and mask.

    Raises:
        Missed: the condition is something else.
    """
    if not (isinstance(condition, ast.Compare) and [*map(type, condition.ops)] == [ast.Eq]):
        raise Missed("the condition is not that two numbers are equal", condition, Code.OTHER_FORM)
    factors = [condition.left, *condition.comparators]
    for factor in factors:  # the list grows during the loop
        if isinstance(factor, ast.BinOp) and isinstance(factor.op, ast.Mult):
            factors += [factor.left, factor.right]
        elif (selection := SELECTION.match(factor)) is not None:
            yield factor, selection["TENSOR"], selection["MASK"]
        elif not (isinstance(factor, ast.Name) or _is_size(factor)):
            said = f"{ast.unparse(factor)} is neither a number nor a size"
            raise Missed(said, factor, Code.READS_VALUES)


def _is_size(node: ast.AST) -> bool:
    """Whether an expression consists of sizes of tensors and constants."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Attribute) and node.attr in _SIZES and isinstance(node.value, ast.Name):
        return True
    if isinstance(node, ast.Attribute) and node.attr not in _SIZES:
        return False
    kinds = (ast.BinOp, ast.Subscript, ast.Slice, ast.Call, ast.Attribute, ast.UnaryOp)
    return isinstance(node, kinds) and all(map(_is_size, child_nodes(node)))


def _numbers(message: ast.expr) -> list[str]:
    """The names whose values a message shows; raises `Missed` if it may read something else."""
    if not isinstance(message, ast.JoinedStr):
        raise Missed("the message is not an f-string", message, Code.OTHER_FORM)
    values = [value for value in message.values if isinstance(value, ast.FormattedValue)]
    shown = [value.value.id for value in values if isinstance(value.value, ast.Name)]
    for value in values:
        if value.conversion != -1 or value.format_spec is not None:
            raise Missed("the message formats a value in its own way", message, Code.OTHER_FORM)
        if isinstance(value.value, ast.Name):
            continue
        if not _is_size(value.value):
            raise Missed(
                f"the message may read {ast.unparse(value.value)} from the device", message, Code.READS_VALUES
            )
        both = {node.id for node in ast.walk(value.value) if isinstance(node, ast.Name)} & set(shown)
        if both:
            raise Missed(
                f"the message shows {', '.join(sorted(both))} and a size of it", message, Code.OTHER_FORM
            )
    return list(dict.fromkeys(shown))
