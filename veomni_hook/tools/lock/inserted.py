"""The calls that a site puts into upstream's code, with their arguments by what they are for."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import TypeAlias

from veomni_hook.patches.code.document import Document
from veomni_hook.patches.code.edit import apply_edits
from veomni_hook.patches.code.scope import parameters
from veomni_hook.patches.code.tree import FUNCTIONS, calls_in, in_text_order, last_name
from veomni_hook.patches.routes.compose import composed, with_copies
from veomni_hook.patches.site import Site

__all__ = ["inserted_calls", "lost", "swapped"]

#: The arguments of calls, by function and parameter: ``{"found": {"cache": "past_key_values"}}``.
Arguments: TypeAlias = Mapping[str, Mapping[str, str]]
_ROOT = "veomni_hook"
#: Arguments that say nothing.
_UNBOUND = ("", "None", "()", "{}")


def inserted_calls(document: Document, site: Site) -> dict[str, dict[str, str]]:
    """Return the arguments of the calls that a site inserts, by function and parameter.

    A second call of a function has its number behind the name, and so has a second value in ``*others`` or in
    a tuple. The arguments of slots are only numbered.
    """
    modules = {}
    for package, names in site.imports:
        name, _, alias = names.partition(" as ")
        modules[alias or name] = f"{package}.{name}"
    slots = {slot.name for slot in site.slots}
    inserted: dict[str, dict[str, str]] = {}
    calls = _calls(document, site) if modules or any(".call(" in edit.text for edit in site.edits) else ()
    for call in in_text_order(calls):
        receiver = last_name(getattr(call.func, "value", call))
        if receiver in modules or receiver in slots:
            name = last_name(call.func)
            known = _parameters(modules[receiver], name) if receiver in modules else ()
            number = sum(key.partition(" ")[0] == name for key in inserted) + 1
            inserted[_numbered(name, number)] = dict(_arguments(call, known))
    return inserted


def lost(old: Arguments, new: Arguments) -> list[str]:
    """The parameters of functions that both call, and that had a value and have none now."""
    return [
        name
        for function, name, text in _both(old, new)
        if text not in _UNBOUND and new[function].get(name, "") in _UNBOUND
    ]


def swapped(
    old: Arguments, new: Arguments, names: Mapping[str, str], taken: Collection[str]
) -> list[tuple[str, str, str]]:
    """The parameters that get another argument than before, with both.

    Args:
        old, new: the arguments.
        names: the new names of what upstream renamed.
        taken: the parameters of upstream's function now. Names of its locals may be others.

    A function that is called more or less often than before is left out: its calls cannot be told apart.
    """
    before, after = (Counter(name.partition(" ")[0] for name in calls) for calls in (old, new))
    return [
        (name, text, now)
        for function, name, text in _both(old, new)
        if before[of := function.partition(" ")[0]] == after[of]
        and (now := new[function].get(name, "")) in taken
        and now not in (text, names.get(text))
        and text.isidentifier()
    ]


def _both(old: Arguments, new: Arguments) -> Iterator[tuple[str, str, str]]:
    for function, arguments in old.items():
        if function in new:
            yield from ((function, *argument) for argument in arguments.items())


def _calls(document: Document, site: Site) -> Iterator[ast.Call]:
    """The calls in the statements of the module that the site's edits change, as they change them."""
    edits = with_copies(document, composed(document, [edit for edit in site.edits if not edit.marker]))
    for statement in document.tree.body:
        start, end = document.span(statement)
        start, end = document.line_start(start), document.next_line(end)
        # What is inserted between two statements, and is indented, belongs to the one before.
        own = [
            edit for edit in edits
            if start <= edit.start <= edit.end <= end and not (edit.end == start and edit.text[:1].isspace())
        ]  # fmt: skip
        if own:
            shifted = [replace(edit, start=edit.start - start, end=edit.end - start) for edit in own]
            yield from calls_in(ast.parse(apply_edits(document.source[start:end], shifted)))


@cache
def _parameters(module: str, name: str) -> Sequence[str]:
    """The parameters of a function of this package, whose text is read; none if it is not defined there."""
    path = f"{module.removeprefix(f'{_ROOT}.').replace('.', '/')}.py"
    for node in ast.parse(files(_ROOT).joinpath(path).read_text("utf-8")).body:
        if isinstance(node, FUNCTIONS) and node.name == name:
            rest = node.args.vararg
            return [
                f"*{parameter.arg}" if parameter is rest else parameter.arg for parameter in parameters(node)
            ]
    return ()


def _arguments(call: ast.Call, known: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = next((at for at, name in enumerate(known) if name.startswith("*")), len(known))
    for at, value in enumerate(call.args):
        name = known[at] if at < rest else f"{known[rest].lstrip('*') if rest < len(known) else 'operand'}"
        yield from _values(name if at < rest else _numbered(name, at - rest + 1), value)
    for keyword in call.keywords:
        yield from _values(keyword.arg or "**", keyword.value)


def _values(name: str, value: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(value, ast.Tuple) and value.elts:
        for number, item in enumerate(value.elts, 1):
            yield _numbered(name, number), ast.unparse(item)
    else:
        yield name, ast.unparse(value)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name} {number}"
