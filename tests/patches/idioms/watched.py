"""Which definitions of a patched module its kernels skip, read from the text, and which of them a slot compares.

This follows calls by their names only, and knows nothing of what idioms recognise: whatever the code beside a
guard calls and the code of the guard does not is skipped, with all that it calls in turn.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

#: How patched code asks: for a kernel, or for what to call instead of a function.
ASKING, CALLING = "kernel", ("at", "separated")
#: Slots whose kernels call the modules that the guard hands over, hooks and replaced forwards included: heads of a
#: loss, and the last steps of an expert.
CALLING_MODULES = (
    "veomni_linear_cross_entropy_",
    "veomni_moe_experts_gated_jointly",
    "veomni_moe_experts_gated_normalised",
)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Miss(NamedTuple):
    """A definition that nobody compares."""

    slot: str
    place: str
    name: str


class Guard(NamedTuple):
    """What a guard decides about: the code that runs without a kernel, and the code that runs with one."""

    slot: str
    skipped: list[ast.AST]
    answer: list[ast.AST]


@dataclass
class Module:
    """The definitions of a patched module."""

    text: str
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    slots: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(ast.parse(self.text)):
            for each in getattr(node, "body", ()) if isinstance(node, (ast.Module, ast.If, ast.Try)) else ():
                if isinstance(each, FUNCTION):
                    self.functions[each.name] = each
                elif isinstance(each, ast.ClassDef):
                    self.classes[each.name] = each
                elif isinstance(each, ast.Assign) and _name_of_call(each.value) == "VeomniSlot":
                    self._add_slot(each)
        for kind, node in self.classes.items():
            # Where a method has a copy with guards, the copy runs.
            node.body = [
                self.functions.pop(f"veomni_{kind}_{getattr(each, 'name', '')}", each) for each in node.body
            ]
            for each in node.body:
                if isinstance(each, FUNCTION):
                    each.name = each.name.removeprefix(f"veomni_{kind}_")

    def _add_slot(self, node: ast.Assign) -> None:
        keywords = {each.arg: each.value for each in node.value.keywords}
        skips = keywords.get("skips")
        self.slots[node.targets[0].id] = {} if skips is None else ast.literal_eval(skips)

    def lineage(self, kind: str) -> list[str]:
        """A class and its bases in the file."""
        found, waiting = [], [kind]
        while waiting:
            name = waiting.pop(0)
            if name in self.classes and name not in found:
                found.append(name)
                waiting += [base.id for base in self.classes[name].bases if isinstance(base, ast.Name)]
        return found

    def method(self, kinds: list[str], name: str) -> str:
        """The definition that ``self.name`` refers to; empty if it is not in the file."""
        for kind in kinds:
            if any(isinstance(each, FUNCTION) and each.name == name for each in self.classes[kind].body):
                return f"{kind}.{name}"
        return ""

    def definition(self, place: str) -> ast.AST:
        """The node of a function or method."""
        kind, _, name = place.rpartition(".")
        if not kind:
            return self.functions[name]
        return next(each for each in self.classes[kind].body if getattr(each, "name", "") == name)

    def made_of(self, kinds: list[str]) -> dict[str, set[str]]:
        """The classes and functions of this file that ``__init__`` makes the attributes of a class of."""
        made: dict[str, set[str]] = {}
        for kind in kinds:
            for node in ast.walk(self.classes[kind]):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                    named = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
                    named &= self.classes.keys() | self.functions.keys()
                    made.setdefault(node.targets[0].attr, set()).update(named)
        return made

    def called(self, code: list[ast.AST], kind: str) -> Counter[str]:
        """The definitions of this file that code calls or hands on, each with the number of times."""
        kinds = self.lineage(kind) if kind else []
        made_of = self.made_of(kinds)
        found: Counter[str] = Counter()
        for node in (inner for each in code for inner in ast.walk(each)):
            if isinstance(node, ast.Name) and node.id in self.functions and isinstance(node.ctx, ast.Load):
                found[node.id] += 1
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                found.update([self.method(kinds, node.attr)])
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                receiver, name = node.func.value, node.func.attr
                if isinstance(receiver, ast.Name) and receiver.id == "self":
                    found.update(self.method(self.lineage(each), "forward") for each in made_of.get(name, ()))
                elif _name_of_call(receiver) == "super":
                    found.update([self.method(kinds[1:], name)])
        del found[""]
        return found

    def below(self, names: set[str]) -> set[str]:
        """Definitions, and those that they call in turn."""
        seen: set[str] = set()
        while names:
            place = names.pop()
            if place not in seen:
                seen.add(place)
                names |= set(self.called([self.definition(place)], place.rpartition(".")[0]))
        return seen


def _name_of_call(node: ast.AST) -> str:
    called = node.func if isinstance(node, ast.Call) else None
    return called.id if isinstance(called, ast.Name) else ""


def _asks(node: ast.AST, slots: dict[str, dict[str, list[str]]]) -> str:
    """The slot that a call asks for a kernel; else empty."""
    called = node.func if isinstance(node, ast.Call) else None
    known = isinstance(called, ast.Attribute) and called.attr == ASKING and isinstance(called.value, ast.Name)
    return called.value.id if known and called.value.id in slots else ""


def guards(method: ast.AST, slots: dict[str, dict[str, list[str]]]) -> Iterator[Guard]:
    """The guards of a method, of all forms of an ``if``."""
    yield from _in_block(getattr(method, "body", []), [], slots)


def _in_block(
    block: list[ast.stmt], after: list[ast.stmt], slots: dict[str, dict[str, list[str]]]
) -> Iterator[Guard]:
    """``after``: the statements that run after the block."""
    for number, statement in enumerate(block):
        rest = [*block[number + 1 :], *after]
        for node in ast.walk(statement):
            if isinstance(node, ast.IfExp):
                yield from (
                    Guard(slot, [node.orelse], [node.body])
                    for inner in ast.walk(node.test)
                    if (slot := _asks(inner, slots))
                )
        if isinstance(statement, ast.If):
            for slot in filter(None, (_asks(inner, slots) for inner in ast.walk(statement.test))):
                returns = isinstance(statement.body[-1], ast.Return)
                yield Guard(slot, [*statement.orelse, *(rest if returns else ())], list(statement.body))
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, None)
            if isinstance(inner, list) and not isinstance(statement, (*FUNCTION, ast.ClassDef)):
                yield from _in_block(inner, rest, slots)


def misses(text: str) -> list[Miss]:
    """The definitions that kernels of a patched module skip, and that no slot compares."""
    module = Module(text)
    found = []
    for kind, owner in module.classes.items():
        for method in (each for each in owner.body if isinstance(each, FUNCTION)):
            place = f"{kind}.{method.name}"
            for guard in guards(method, module.slots):
                if guard.slot.startswith(CALLING_MODULES):
                    continue
                skipped = module.called(guard.skipped, kind) - module.called(guard.answer, kind)
                compared = {
                    name
                    for at, names in module.slots[guard.slot].items()
                    if at.rpartition(".")[0] in module.lineage(kind)
                    for name in names
                }
                found += [Miss(guard.slot, place, n) for n in sorted(module.below(set(skipped)) - compared)]
            found += _missed_at_calls(module, method, place)
    return found


def _missed_at_calls(module: Module, method: ast.AST, place: str) -> Iterator[Miss]:
    made_of = module.made_of(module.lineage(place.rpartition(".")[0]))
    for node in ast.walk(method):
        called = node.func if isinstance(node, ast.Call) else None
        if not isinstance(called, ast.Attribute) or called.attr not in CALLING:
            continue
        names = [each.id for each in (called.value, *node.args) if isinstance(each, ast.Name)]
        # Before transformers 5.17, layers hold the functions that they call.
        for each in (each for each in node.args if isinstance(each, ast.Attribute)):
            names += made_of.get(each.attr, ())
        slot = next((name for name in names if name in module.slots), "")
        function = next((name for name in names if name in module.functions), "")
        if not slot or not function:
            continue
        skips = module.slots[slot]
        if called.attr == "at":
            missed = module.below({function}) - {function} - set(skips.get(function, ()))
            missed |= set() if function in skips else {function}
        else:
            missed = module.below({function}) - set(skips.get(place, ()))
        yield from (Miss(slot, place, name) for name in sorted(missed))
