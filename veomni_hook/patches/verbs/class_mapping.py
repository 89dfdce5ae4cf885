"""Class mappings: constructor calls of a class ask for its replacement, and lists of names get its name."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping

from veomni_hook.errors import PatchTargetError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.nearest_names import listed, nearest
from veomni_hook.patches.code.renames import renamed_parameters
from veomni_hook.patches.code.scope import global_uses, parameter_names
from veomni_hook.patches.code.tree import FUNCTIONS, walk_ast
from veomni_hook.patches.plan import Plan, Step
from veomni_hook.patches.spec import PatchType
from veomni_hook.patches.verbs.additions import append_after_imports
from veomni_hook.patches.verbs.external import external_import
from veomni_hook.patches.verbs.targets import class_named, members

__all__ = ["constructor_calls", "plan_class_mappings"]

_IMPORT = "from veomni_hook.patches.mapped import MappedClass as VeomniMappedClass"
_RECORDED = "_can_record_outputs"
_NAMED = "_no_split_modules"


def plan_class_mappings(plan: Plan) -> None:
    """Plan every mapping.

    Raises:
        PatchTargetError: there is no such class, the module never constructs it by name, or it keeps it where
            a constructor call cannot be found.
        ReplacementError: the replacement does not exist.
    """
    first = True
    for index, step in plan.of_kind(PatchType.CLASS_MAPPING.value):
        document, target = plan.document, step.target
        if step.patch.regex and not any(found.kind == "class" for found in document.find(target)):
            raise _unmatched(document, target, plan.where(index))
        _, owner = class_named(document, target, where=plan.where(index))
        calls = constructor_calls(document, target)
        if not calls:
            raise PatchTargetError(
                f"{document.module} never constructs {target}, so a mapping of it would change nothing",
                where=plan.where(index),
                fix="map a class that the module constructs by name, or use replace_class",
                target=target,
            )
        _refuse_kept(plan, index, calls)
        replacement = step.patch.replacement_source or ""
        external_import(plan, index, target)
        made = f"veomni_map_{target}"
        if first:
            append_after_imports(plan, index, _IMPORT, "", gap=1)
        text = _declaration(made, step, _renamed(document, owner))
        append_after_imports(plan, index, text, plan.marker(index, "MAPPED CLASS"), gap=0)
        first = False
        for name in calls:
            start, end = document.span(name)
            plan.change(index, start, end, f"{made}({target})")
        for name in _recorded(document, target):
            start, end = document.span(name)
            plan.change(index, start, end, f"{made}.either({target})")
        new = replacement.rpartition(".")[2]
        for constant in _listed(document, target):
            if new != target:
                plan.insert(index, document.span(constant)[1], f", {json.dumps(new)}")


def _unmatched(document: Document, expression: str, where: str) -> PatchTargetError:
    names = [found.qualname for found in document.definitions() if found.kind == "class"]
    close = nearest(re.sub(r"\W", "", expression), names)
    return PatchTargetError(
        f"no class of {document.module} matches the expression {expression!r}",
        where=where,
        fix=f"correct the expression; nearest class names: {listed(close)}",
        target=expression,
        nearest=close,
    )


def constructor_calls(document: Document, name: str) -> list[ast.AST]:
    """The uses of a class's name that are called, in text order."""
    called = {id(node.func) for node in walk_ast(document.tree) if isinstance(node, ast.Call)}
    return [use.node for use in global_uses(document.tree, [name]) if id(use.node) in called]


def _declaration(made: str, step: Step, renamed: Mapping[str, str]) -> str:
    module, _, name = (step.patch.replacement_source or "").rpartition(".")
    given = [json.dumps(step.target), json.dumps(f"{module}:{name}"), "__name__"]
    given += [
        f"config={json.dumps(step.config.name)}",
        f"declared={json.dumps(step.declared or step.target)}",
    ]
    given += [f"weights={json.dumps(step.patch.weights)}"] if step.patch.weights else []
    given += [f"renamed={json.dumps(renamed)}"] if renamed else []
    return f"{made} = VeomniMappedClass(\n    {', '.join(given)}\n)"


def _renamed(document: Document, owner: ast.ClassDef) -> dict[str, str]:
    """The new names of parameters of the class's forward, by the old ones that upstream still takes."""
    forward = members(owner).get("forward")
    taken = parameter_names(forward) if isinstance(forward, FUNCTIONS) else set()
    renames = renamed_parameters(document) if taken else {}
    return {old: rename.new for old, rename in renames.items() if rename.new in taken and old not in taken}


def _refuse_kept(plan: Plan, index: int, calls: list[ast.AST]) -> None:
    """Raise if the class is a value somewhere: what is constructed through that value is not found."""
    document, target = plan.document, plan.steps[index].target
    parents = {id(child): node for node in walk_ast(document.tree) for child in ast.iter_child_nodes(node)}
    known = {id(node) for node in (*calls, *_recorded(document, target))}
    kept = [
        document.lineno(document.start(use.node))
        for use in global_uses(document.tree, [target])
        if id(use.node) not in known and _is_value(parents, use.node)
    ]
    if kept:
        raise PatchTargetError(
            f"{document.module} keeps {target} elsewhere (line {listed(map(str, kept))}), from where it may "
            "be constructed, too",
            where=plan.where(index),
            fix="use replace_class for it",
            target=target,
        )


def _is_value(parents: dict[int, ast.AST], node: ast.AST) -> bool:
    parent = parents[id(node)]
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("_from_config", "from_config", "from_pretrained")
    if isinstance(parent, ast.IfExp):
        return node is not parent.test
    return isinstance(parent, ast.Dict | ast.List | ast.Set | ast.Assign | ast.Return)


def _recorded(document: Document, target: str) -> Iterator[ast.Name]:
    """Uses of the class in `_can_record_outputs`."""
    for value in _assigned(document, _RECORDED):
        yield from (node for node in walk_ast(value) if isinstance(node, ast.Name) and node.id == target)


def _listed(document: Document, target: str) -> Iterator[ast.Constant]:
    """The class's name as a string in `_no_split_modules`."""
    for value in _assigned(document, _NAMED):
        yield from (
            node for node in walk_ast(value) if isinstance(node, ast.Constant) and node.value == target
        )


def _assigned(document: Document, name: str) -> Iterator[ast.AST]:
    for node in walk_ast(document.tree):
        if isinstance(node, ast.Assign) and [getattr(each, "id", "") for each in node.targets] == [name]:
            yield node.value
