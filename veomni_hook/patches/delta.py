"""What patches change in a module, class by class, for classes that already exist.

An import executes the whole patched text. A loaded model has classes from the unpatched text, so only what
the patches changed is rebuilt: the changed class members, and the statements that they need.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from veomni_hook.patches.code.scope import own_names, read_names
from veomni_hook.patches.code.tree import decorator_name

__all__ = ["BASES", "ChangedClass", "Delta", "adopted_name", "delta"]

#: The name under which a statement of `ChangedClass.node` finds the bases of the class.
BASES = "veomni_bases"
#: Class decorators that do not change methods, or whose effect a subclass inherits.
_INHERITED = frozenset(("auto_docstring", "use_kernel_forward_from_hub", "use_kernelized_func"))
_CONSTRUCTORS = ("__init__", "__new__")


@dataclass(frozen=True)
class ChangedClass:
    """One class that patches change.

    Attributes:
        name: its name.
        members: names of the members that are new or differ from upstream.
        node: a class statement with these members, with bases taken from `BASES` and with the line numbers of
            the patched text.
        refused: why it cannot be used for existing objects; empty if it can.
    """

    name: str
    members: tuple[str, ...]
    node: ast.ClassDef
    refused: str


@dataclass
class Delta:
    """What the patched text of a module has and upstream does not.

    Attributes:
        future: its ``from __future__`` statements.
        added: statements that bind new names only, in order.
        classes: the changed classes, by name.
        shared: upstream names (functions included) to which the patched text gives another value. All models
            of the module share these.
    """

    future: list[ast.stmt] = field(default_factory=list)
    added: list[ast.stmt] = field(default_factory=list)
    classes: dict[str, ChangedClass] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)


def adopted_name(kind: str) -> str:
    """Return the name under which changed code finds the changed form of the class ``kind``."""
    return f"veomni_adopted_{kind}"


def delta(upstream: str, patched: str) -> Delta:
    """Compare a module's text with its patched form."""
    before = ast.parse(upstream).body
    after = ast.parse(patched).body
    changes = Delta()
    known = set(_texts(_units(before)))
    bound = own_names(before)
    classes = {class_.name: class_ for class_ in before if isinstance(class_, ast.ClassDef)}
    tainted: set[str] = set()
    changed: list[tuple[ast.ClassDef, ast.ClassDef]] = []
    for unit in _units(after):
        if isinstance(unit, ast.ClassDef) and unit.name in classes:
            changed.append((classes[unit.name], unit))
        elif isinstance(unit, ast.ImportFrom) and unit.module == "__future__":
            changes.future.append(unit)
        elif ast.dump(unit) not in known and not _is_docstring(unit):
            names = own_names([unit])
            if names & bound:
                changes.shared |= names & bound
            elif read_names(unit) & tainted:
                tainted |= names
                continue
            else:
                changes.added.append(unit)
            tainted |= changes.shared
    compared = [_compared(old, new, tainted) for old, new in changed]
    changes.classes = {change.name: change for change in compared if change is not None}
    slots = own_names(changes.added)
    functions = (function for function in changes.added if isinstance(function, ast.FunctionDef))
    for node in (*(change.node for change in changes.classes.values()), *functions):
        _adopt(node, slots, changes.classes)
    return changes


def _compared(old: ast.ClassDef, new: ast.ClassDef, tainted: set[str]) -> ChangedClass | None:
    before, after = _members(old.body), _members(new.body)
    members = tuple(name for name, group in after.items() if _texts(group) != _texts(before.get(name, [])))
    removed = [name for name in before if name not in after]
    same_decorators = _texts(old.decorator_list) == _texts(new.decorator_list)
    same_bases = _texts([*old.bases, *old.keywords]) == _texts([*new.bases, *new.keywords])
    if not members and not removed and same_decorators and same_bases:
        return None
    node = ast.ClassDef(
        name=new.name,
        bases=[ast.Starred(ast.Name(BASES, ast.Load()), ast.Load())],
        keywords=[],
        body=[statement for name in members for statement in after[name]] or [ast.Pass()],
        decorator_list=[
            decorator for decorator in new.decorator_list if decorator_name(decorator) not in _INHERITED
        ],
    )
    if "type_params" in ast.ClassDef._fields:
        vars(node)["type_params"] = []  # from Python 3.12 on
    ast.fix_missing_locations(ast.copy_location(node, new))
    constructor = next((name for name in _CONSTRUCTORS if name in members), None)
    shared = sorted(read_names(node) & tainted)
    refused = ""
    if constructor is not None:
        refused = f"a patch changes its {constructor}, which has run already"
    elif not same_bases:
        refused = "a patch changes its bases"
    elif removed:
        refused = f"a patch removes its {', '.join(removed)}"
    elif shared:
        names = ", ".join(shared)
        refused = f"patches also change {names} in its module, which models that are not adopted use, too"
    return ChangedClass(new.name, members, node, refused)


def _adopt(node: ast.AST, slots: Collection[str], classes: Collection[str]) -> None:
    """Let guards name the changed forms of classes, because guards compare types."""
    for call in ast.walk(node):
        function = call.func if isinstance(call, ast.Call) else None
        receiver = function.value if isinstance(function, ast.Attribute) else None
        if isinstance(call, ast.Call) and isinstance(receiver, ast.Name) and receiver.id in slots:
            for argument in call.args:
                if isinstance(argument, ast.Name) and argument.id in classes:
                    argument.id = adopted_name(argument.id)


def _units(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, with each import split into one per name, because patches add and drop names."""
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                one = (
                    ast.Import([alias])
                    if isinstance(statement, ast.Import)
                    else ast.ImportFrom(statement.module, [alias], statement.level)
                )
                yield ast.copy_location(one, statement)
        else:
            yield statement


def _members(body: Sequence[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Statements of a class body by the name that they bind; a property and its setter share one name."""
    members: dict[str, list[ast.stmt]] = {}
    for statement in body:
        if not _is_docstring(statement) and not isinstance(statement, ast.Pass):
            name = ", ".join(sorted(own_names([statement])))
            members.setdefault(name or ast.dump(statement), []).append(statement)
    return members


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _texts(nodes: Iterable[ast.AST]) -> list[str]:
    return [ast.dump(node) for node in nodes]
