"""Match code against the functions of a kernel's reference file."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache

from veomni_hook.patches.graph.forms import Form, Unknown, reference_form, reference_scope
from veomni_hook.patches.graph.matching import ANY, Difference, Match, Rule, find, match
from veomni_hook.patches.graph.nodes import walk
from veomni_hook.patches.graph.text import brief
from veomni_hook.patterns import pattern_source

__all__ = ["recognised", "reference_names", "specific_first", "variant_names"]


@cache
def variant_names(op: str) -> tuple[str, ...]:
    """The variants of an op, in the order of its table, which is read as text: no kernel is imported."""
    path = f"kernels/{op}/variants.py"
    for node in ast.parse(pattern_source(path)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VARIANTS":
            assert isinstance(node.value, ast.Dict)  # noqa: S101
            return tuple(ast.literal_eval(key) for key in node.value.keys if key is not None)
    raise ValueError(f"{path} has no table VARIANTS")


@cache
def reference_names(path: str) -> tuple[str, ...]:
    """The functions of a reference file that are a variant's formula, sorted.

    ``variant__words`` is `variant` in other words.

    Args:
        path: the file, from the package's root: ``kernels/rms_norm/reference.py``.
    """
    variants = variant_names(path.split("/")[1])
    functions = reference_scope(path).functions
    return tuple(sorted(name for name in functions if name.partition("__")[0] in variants))


@cache
def specific_first(op: str) -> tuple[str, ...]:
    """The variants of an op, the larger formulas first: a smaller one may be a part of them."""
    path = f"kernels/{op}/reference.py"
    sizes = {name: len([*walk(reference_form(path, name).result)]) for name in variant_names(op)}
    return tuple(sorted(sizes, key=lambda name: -sizes[name]))


def recognised(
    path: str,
    form: Form | Unknown,
    rules: Mapping[str, Rule],
    *,
    names: Sequence[str] = (),
    otherwise: Rule = ANY,
) -> tuple[str, Match] | Difference:
    """The first formula of a reference file that matches a form.

    Args:
        path: the reference file.
        form: what upstream's code computes; `Unknown` matches no formula.
        rules: what operands may match, by their names.
        names: the functions to try, in this order; by default the formulas of all variants.
        otherwise: the rule for operands that ``rules`` does not name.

    Returns:
        The function's name and the match, or the difference to the nearest formula.
    """
    if isinstance(form, Unknown):
        return Difference(f"{form.reason} (line {form.lineno})", 0.0, form.lineno)
    tried = names or reference_names(path)
    nearest = Difference("", -1.0)
    for name in tried:
        pattern = reference_form(path, name)
        made = match(pattern, form, {each: rules.get(each, otherwise) for each in pattern.arguments})
        if isinstance(made, Match):
            return name, made
        if made.depth > nearest.depth:
            nearest = Difference(f"nearest is {name}: {made.text}", made.depth, made.lineno)
    if nearest.depth > 0:
        return nearest
    for name in tried:
        pattern = reference_form(path, name)
        if any(find(pattern, form, {each: rules.get(each, otherwise) for each in pattern.arguments})):
            line = form.result.lineno
            text = f"nearest is {name}: expected nothing after it, found {brief(form.result)} (line {line})"
            return Difference(text, 0.0, line)
    return nearest
