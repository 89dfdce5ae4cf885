"""Class mappings: constructor calls of a class ask for its replacement, and lists of names get its name."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping

from veomni_hook.errors import PatchTargetError
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.nearest_names import listed
from veomni_hook.patches.code.renames import renamed_parameters
from veomni_hook.patches.code.scope import global_uses, parameter_names
from veomni_hook.patches.code.tree import FUNCTIONS, walk_ast
from veomni_hook.patches.plan import Plan, Step, Task
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
    for number, task in enumerate(plan.of_kind(PatchType.CLASS_MAPPING)):
        document, target = plan.document, task.target
        if task.patch.regex and not any(definition.kind == "class" for definition in document.find(target)):
            raise task.missing(
                f"no class of {document.module} matches the expression {target!r}",
                "correct the expression; nearest class names",
                re.sub(r"\W", "", target),
                [definition.qualname for definition in document.definitions() if definition.kind == "class"],
            )
        _, owner = class_named(task)
        calls = constructor_calls(document, target)
        if not calls:
            raise task.error(
                PatchTargetError,
                f"{document.module} never constructs {target}, so a mapping of it would change nothing",
                "map a class that the module constructs by name, or use replace_class",
            )
        recorded = _in_lists(document, _RECORDED, "id", target)
        _refuse_kept(task, calls, recorded)
        external_import(task, target)
        mapping = f"veomni_map_{target}"
        if not number:
            append_after_imports(task, _IMPORT, gap=1)
        text = _declaration(mapping, task.step, _renamed(document, owner))
        append_after_imports(task, text, task.marker("MAPPED CLASS"), gap=0)
        for name, asked in (
            *((call, mapping) for call in calls),
            *((use, f"{mapping}.either") for use in recorded),
        ):
            task.change(*document.span(name), f"{asked}({target})")
        new = (task.patch.replacement_source or "").rpartition(".")[2]
        if new != target:
            for name in _in_lists(document, _NAMED, "value", target):
                task.insert(document.span(name)[1], f", {json.dumps(new)}")


def constructor_calls(document: Document, name: str) -> list[ast.AST]:
    """The uses of a class's name that are called, in text order."""
    called = {id(node.func) for node in walk_ast(document.tree) if isinstance(node, ast.Call)}
    return [use.node for use in global_uses(document.tree, [name]) if id(use.node) in called]


def _declaration(mapping: str, step: Step, renamed: Mapping[str, str]) -> str:
    module, _, name = (step.patch.replacement_source or "").rpartition(".")
    arguments = [json.dumps(step.target), json.dumps(f"{module}:{name}"), "__name__"]
    arguments += [
        f"config={json.dumps(step.config.name)}",
        f"declared={json.dumps(step.declared or step.target)}",
    ]
    arguments += [f"weights={json.dumps(step.patch.weights)}"] if step.patch.weights else []
    arguments += [f"renamed={json.dumps(renamed)}"] if renamed else []
    return f"{mapping} = VeomniMappedClass(\n    {', '.join(arguments)}\n)"


def _renamed(document: Document, owner: ast.ClassDef) -> dict[str, str]:
    """The new names of parameters of the class's forward, by the old ones that upstream still takes."""
    forward = members(owner).get("forward")
    taken = parameter_names(forward) if isinstance(forward, FUNCTIONS) else set()
    renames = renamed_parameters(document) if taken else {}
    return {old: rename.new for old, rename in renames.items() if rename.new in taken and old not in taken}


def _refuse_kept(task: Task, calls: list[ast.AST], recorded: list[ast.AST]) -> None:
    """Raise if the class is a value somewhere: what is constructed through that value is not found."""
    document, target = task.document, task.target
    parents = {id(child): node for node in walk_ast(document.tree) for child in ast.iter_child_nodes(node)}
    known = {id(node) for node in (*calls, *recorded)}
    kept = [
        document.lineno(document.start(use.node))
        for use in global_uses(document.tree, [target])
        if id(use.node) not in known and _is_value(parents, use.node)
    ]
    if kept:
        raise task.error(
            PatchTargetError,
            f"{document.module} keeps {target} elsewhere (line {listed(map(str, kept))}), from where it may "
            "be constructed, too",
            "use replace_class for it",
        )


def _is_value(parents: dict[int, ast.AST], node: ast.AST) -> bool:
    parent = parents[id(node)]
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("_from_config", "from_config", "from_pretrained")
    if isinstance(parent, ast.IfExp):
        return node is not parent.test
    return isinstance(parent, ast.Dict | ast.List | ast.Set | ast.Assign | ast.Return)


def _in_lists(document: Document, name: str, attribute: str, target: str) -> list[ast.AST]:
    """The nodes that are the class, by an attribute of them, in what the module assigns to ``name``."""
    return [
        node
        for assigned in walk_ast(document.tree)
        if isinstance(assigned, ast.Assign) and [getattr(t, "id", "") for t in assigned.targets] == [name]
        for node in walk_ast(assigned.value)
        if getattr(node, attribute, None) == target
    ]
