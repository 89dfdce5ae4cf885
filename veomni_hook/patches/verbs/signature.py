"""Check that a replacement can be called like the original.

Signatures are read from the syntax tree: at run time a decorator may hide them. A parameter counts as dropped
if the replacement neither has it nor accepts it in ``*args`` or ``**kwargs``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from veomni_hook.errors import SignatureError
from veomni_hook.patches.code.document import Document, FunctionNode
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.walk import walk_ast
from veomni_hook.patches.plan import Plan

__all__ = ["check_signature"]


def check_signature(
    plan: Plan,
    index: int,
    original: FunctionNode,
    replacement: FunctionNode,
    *,
    target: str,
    owner: str = "",
) -> None:
    """Compare the parameters of an upstream function with those of its replacement.

    A lenient config may drop a parameter that no call in the module passes; otherwise the plan gets a remark.

    Args:
        plan: the plan.
        index: the step that the replacement belongs to.
        original: upstream's function.
        replacement: what replaces it.
        target: the replaced definition, for the error.
        owner: the class of a method, whose first parameter is the instance and is not compared.

    Raises:
        SignatureError: a parameter is dropped, or a new one has no default, and the config is not lenient.
    """
    skip = int(bool(owner) and not _is_static(original))
    before, after = _Parameters(original, skip), _Parameters(replacement, skip)
    dropped = [
        name for name in before.named if not after.takes(name, keyword_only=name in before.keyword_only)
    ]
    dropped += [f"*{before.rest}"] if before.rest and not after.rest else []
    dropped += [f"**{before.keywords}"] if before.keywords and not after.keywords else []
    required = [name for name in after.required if name not in before.named and not before.rest]
    if plan.steps[index].lenient:
        used = {
            name
            for call in _calls(plan.document, original.name, owner)
            for name in _given(call, before, after)
        }
        dropped = [name for name in dropped if name.lstrip("*") in used]
        required = []
    what = fix = ""
    if dropped:
        what = f"the replacement of {target} drops {listed(dropped)}"
        fix = "take these parameters (or *args, **kwargs), or say allow_signature_change=True"
    elif required:
        what = f"the replacement of {target} needs parameters that upstream has not: {listed(required)}"
        fix = "give them defaults, or say allow_signature_change=True"
    if what:
        signatures = f"upstream: {_signature(original)}; replacement: {_signature(replacement)}"
        where = f"{plan.where(index)}; {signatures}"
        plan.tolerate(index, SignatureError(what, where=where, fix=fix, target=target))


class _Parameters:
    def __init__(self, function: FunctionNode, skip: int) -> None:
        arguments = function.args
        positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        without_default = positional[: len(positional) - len(arguments.defaults)]
        self.positional = positional[skip:]
        self.keyword_only = [argument.arg for argument in arguments.kwonlyargs]
        self.named = [*self.positional, *self.keyword_only]
        self.rest = arguments.vararg.arg if arguments.vararg else ""
        self.keywords = arguments.kwarg.arg if arguments.kwarg else ""
        given = zip(self.keyword_only, arguments.kw_defaults, strict=True)
        self.required = [*without_default[skip:], *(name for name, default in given if default is None)]

    def takes(self, name: str, *, keyword_only: bool) -> bool:
        if name in self.named or self.keywords:
            return True
        return bool(self.rest) and not keyword_only


def _is_static(function: FunctionNode) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)


def _signature(function: FunctionNode) -> str:
    return f"({ast.unparse(function.args)})"


def _given(call: ast.Call, before: _Parameters, after: _Parameters) -> Iterator[str]:
    """Names of upstream parameters that the call passes and the replacement would not accept."""
    for number, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            break
        if number < len(before.positional):
            yield before.positional[number]
        elif before.rest:
            yield before.rest
    for keyword in call.keywords:
        if keyword.arg is None:
            continue  # the content of passed ``**kwargs`` is unknown here
        yield keyword.arg
        if keyword.arg not in before.named and keyword.arg not in after.named and before.keywords:
            yield before.keywords


def _calls(document: Document, name: str, owner: str) -> Iterator[ast.Call]:
    """Calls in the module that may mean the function: by its name, or through an instance."""
    holders = _holders(document, owner.rpartition(".")[2]) if owner and name == "forward" else set()
    for node in walk_ast(document.tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name):
            called = owner.rpartition(".")[2] if owner and name == "__init__" else name if not owner else None
            if function.id == called:
                yield node
        elif isinstance(function, ast.Attribute):
            if function.attr in holders or (owner and function.attr == name != "__init__"):
                yield node


def _holders(document: Document, owner: str) -> set[str]:
    """Attributes to which a call of the class is assigned: ``self.attn = Attention(config)``."""
    found: set[str] = set()
    for node in walk_ast(document.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Name) and function.id == owner:
                found.update(target.attr for target in node.targets if isinstance(target, ast.Attribute))
    return found
