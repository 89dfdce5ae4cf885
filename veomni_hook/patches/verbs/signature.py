"""Let a replacement be called like the original, or say why it cannot.

Signatures are read from the syntax tree: at run time a decorator may hide them. A parameter counts as dropped
if the replacement neither has it nor accepts it in ``*args``, or in ``**kwargs`` that its body uses. It
counts as renamed if the replacement has another one instead, which nobody passes. Where upstream says that
it was renamed, the replacement takes the new name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from veomni_hook.errors import SignatureError
from veomni_hook.patches.code.document import Document, FunctionNode, statements_of
from veomni_hook.patches.code.edit import Edit, apply_edits
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.renames import Rename, renamed_parameters
from veomni_hook.patches.code.scope import defaults
from veomni_hook.patches.code.snippet import Snippet
from veomni_hook.patches.code.tree import walk_ast
from veomni_hook.patches.plan import Task
from veomni_hook.patches.report import Remark

__all__ = ["check_signature", "remark_rename", "with_new_names"]


def with_new_names(
    task: Task, snippet: Snippet, pairs: Iterable[tuple[FunctionNode, FunctionNode]]
) -> Snippet:
    """Return a replacement whose parameters have the names that upstream gave them since it was written.

    Its body goes on with the old names, and the plan gets a harmless remark.

    Args:
        task: that of the replacement.
        snippet: the replacement.
        pairs: upstream's functions with those of the snippet that replace them.
    """
    renames = renamed_parameters(task.document)
    edits: list[Edit] = []
    for original, replacement in pairs if renames else ():
        before, after = _Parameters(original), _Parameters(replacement)
        used = {node.id for part in replacement.body for node in walk_ast(part) if isinstance(node, ast.Name)}
        for argument in (*replacement.args.posonlyargs, *replacement.args.args, *replacement.args.kwonlyargs):
            old, rename = argument.arg, renames.get(argument.arg)
            if rename is None or old in before.named or rename.new not in before.named:
                continue
            if rename.new not in after.named and rename.new not in used:
                edits += _renaming(snippet.document, replacement, argument, rename.new)
                remark_rename(task, old, rename)
    return snippet.with_text(apply_edits(snippet.document.source, edits))


def _renaming(document: Document, function: FunctionNode, argument: ast.arg, new: str) -> Iterator[Edit]:
    start = document.start(argument)
    yield Edit(start, start + len(argument.arg), new)
    for statement in statements_of(function)[:1]:
        binding = f"{argument.arg} = {new}"
        start = document.start(statement)
        if document.begins_line(statement):
            start, binding = document.line_start(start), f"{document.indent(statement)}{binding}\n"
        else:
            binding = f"{binding}; "
        yield Edit(start, start, binding)


def remark_rename(task: Task, old: str, rename: Rename) -> None:
    """Say once that a step was written with the earlier name of a parameter."""
    plan, config = task.plan, task.step.config.name
    until = f", and takes the old name until {rename.until}" if rename.until else ""
    remark = Remark(
        config,
        task.target,
        f"renamed: {old} is {rename.new} in this {plan.origin.distribution}{until}",
        task.where,
        f"none is needed: what {config} calls {old} is bound to {rename.new}",
        harmless=True,
    )
    if remark not in plan.remarks:
        plan.remarks.append(remark)


def check_signature(
    task: Task,
    original: FunctionNode,
    replacement: FunctionNode,
    *,
    target: str,
    owner: str = "",
) -> None:
    """Compare the parameters of an upstream function with those of its replacement.

    A lenient config may drop a parameter that no call in the module passes, and take them in another order if
    no call passes them by position; otherwise the plan gets a remark.

    Args:
        task: that of the replacement.
        original: upstream's function.
        replacement: what replaces it.
        target: the replaced definition, for the error.
        owner: the class of a method, whose first parameter is the instance and is not compared.

    Raises:
        SignatureError: a parameter is dropped, renamed or at another position, or a new one has no default,
            and the config is not lenient.
    """
    is_static = "staticmethod" in {getattr(node, "id", "") for node in original.decorator_list}
    skip = int(bool(owner) and not is_static)
    before, after = _Parameters(original, skip), _Parameters(replacement, skip)
    calls = list(_calls(task.document, original.name, owner))
    passed = {name for call in calls for name in _given(call, before, after)}
    dropped = [name for name in before.named if not after.takes(name, before.keyword_only)]
    dropped += [f"*{before.rest}"] if before.rest and not after.rest else []
    dropped += [f"**{before.keywords}"] if before.keywords and not after.keywords else []
    unnamed = [name for name in before.named if name not in after.named and name not in after.texts]
    required = [name for name in after.required if name not in before.named and not before.rest]
    swapped = [
        name
        for position, name in enumerate(before.positional)
        if name in after.positional and after.positional.index(name) != position
    ]
    if task.step.config.lenient:
        dropped = [name for name in dropped if name.lstrip("*") in passed]
        unnamed = [name for name in unnamed if name in passed]
        most = max((len(call.args) for call in calls), default=0)
        swapped = [name for name in swapped if before.positional.index(name) < most]
        required = []
    new = [name for name in after.named if name not in before.named and name not in passed]
    what = fix = ""
    if dropped:
        what = f"the replacement of {target} drops {listed(dropped)}"
        what += f", and has {listed(new)}, which nobody passes" if new else ""
        fix = "take these parameters (or *args, **kwargs, and use them), or say allow_signature_change=True"
    elif unnamed and new and not after.rest:
        instead = [f"{_instead(before, after, name, unnamed)} (for {name})" for name in new]
        what = f"nobody passes {listed(new)} to the replacement of {target}: upstream has {listed(instead)}"
        fix = "give its parameters upstream's names, or say allow_signature_change=True"
    elif required:
        what = f"the replacement of {target} needs parameters that upstream has not: {listed(required)}"
        fix = "give them defaults, or say allow_signature_change=True"
    elif swapped:
        what = f"the replacement of {target} has {listed(swapped)} at other positions than upstream"
        fix = "put its parameters in upstream's order, or say allow_signature_change=True"
    if what:
        where = f"{task.where}; upstream: ({ast.unparse(original.args)}); "
        where += f"replacement: ({ast.unparse(replacement.args)})"
        task.tolerate(task.error(SignatureError, what, fix, where=where, target=target))


def _instead(before: _Parameters, after: _Parameters, name: str, unnamed: list[str]) -> str:
    """The parameter that upstream has instead of one that only the replacement has."""
    position = after.positional.index(name) if name in after.positional else len(before.positional)
    beside = before.positional[position : position + 1]
    return next((theirs for theirs in beside if theirs in unnamed), (nearest(name, unnamed) or unnamed)[0])


class _Parameters:
    def __init__(self, function: FunctionNode, skip: int = 0) -> None:
        arguments, known = function.args, defaults(function)
        self.positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][skip:]
        self.keyword_only = [argument.arg for argument in arguments.kwonlyargs]
        self.named = [*self.positional, *self.keyword_only]
        self.rest = arguments.vararg.arg if arguments.vararg else ""
        self.keywords = arguments.kwarg.arg if arguments.kwarg else ""
        self.required = [name for name in self.named if known[name] is None]
        nodes = [node for statement in function.body for node in walk_ast(statement)]
        self.hands_on = any(isinstance(node, ast.Name) and node.id == self.keywords for node in nodes)
        #: Texts in the body, which may be names of parameters that it reads from ``**kwargs``.
        self.texts = {node.value for node in nodes if isinstance(node, ast.Constant)}

    def takes(self, name: str, keyword_only: list[str]) -> bool:
        return name in self.named or self.hands_on or (bool(self.rest) and name not in keyword_only)


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
    attributes: set[str] = set()
    for node in walk_ast(document.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Name) and function.id == owner:
                attributes.update(target.attr for target in node.targets if isinstance(target, ast.Attribute))
    return attributes
