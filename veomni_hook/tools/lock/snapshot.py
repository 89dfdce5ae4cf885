"""One module as a lock records it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b

from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Definition, Document, has_docstring
from veomni_hook.patches.code.edit import reindent
from veomni_hook.patches.code.renames import renames
from veomni_hook.patches.code.tree import FUNCTIONS, walk_ast
from veomni_hook.patches.graph import Form, Scope, canonical
from veomni_hook.patches.idioms import recognise as recogniser
from veomni_hook.patches.routes.config import relied_on
from veomni_hook.patches.selection import selected
from veomni_hook.patches.site import Status
from veomni_hook.patches.spec import Patch, PatchConfig, PatchType
from veomni_hook.tools.lock.inserted import inserted_calls
from veomni_hook.tools.lock.records import Body, LockedModule, LockedSite, Override
from veomni_hook.tools.lock.signatures import own_functions, signature

__all__ = ["overrides_of", "snapshot"]


def overrides_of(configs: Iterable[PatchConfig], document: Document) -> tuple[Override, ...]:
    """Return the upstream definitions that configs replace, change or rely on; sorted.

    Args:
        configs: the configs for a module, possibly with others.
        document: the module.
    """
    fitting = (config for config in configs if config.applies_to(document.module))
    overrides = {
        one
        for config in fitting
        for patch, _ in selected(config, document)
        for one in _overrides(config, patch)
    }
    return tuple(sorted(overrides))


def snapshot(
    module: str,
    text: str,
    *,
    overrides: Sequence[Override] = (),
    known: Mapping[str, str] | None = None,
    idioms: bool = True,
    optional: Collection[str] = (),
) -> LockedModule:
    """Record a module.

    Args:
        module: its name.
        text: its source.
        overrides: what configs override there, from `overrides_of`.
        known: definitions of an older lock, with their fingerprints. They are recorded too; a missing one is
            searched under other names.
        idioms: whether idioms route anything; without them only overrides are recorded.
        optional: the idioms to ask of those that apply only with a setting, as for `recognise`.

    Raises:
        SyntaxError: the source is not valid Python.
    """
    document = Document(text, module)
    old = known or {}
    overridden = [one.target for one in overrides]
    recognised = recogniser.recognise(document, optional=optional) if idioms else []
    sites = [
        site
        for site in recognised
        if not any(f"{site.target}.".startswith(f"{name}.") for name in overridden)
    ]
    routed = [site for site in sites if site.status is Status.ROUTED]
    locked = tuple(
        LockedSite(
            site.op,
            site.target,
            site.variant,
            site.form,
            (site.target, *relied_on(document, site)) if document.find(site.target) else (),
            inserted_calls(document, site),
        )
        for site in routed
    )
    names = sorted({*overridden, *old, *(name for site in locked for name in site.bodies)})
    scope = Scope(document.tree)
    bodies = {name: _body(document, name, scope, overridden=name in overridden) for name in names}
    return LockedModule(
        tuple(sorted(locked, key=lambda site: (site.target, site.op))),
        tuple(overrides),
        {name: body for name, body in bodies.items() if body is not None},
        {
            (site.op, site.target): site.reason or site.status.value
            for site in sites
            if site.status is not Status.ROUTED
        },
        dict(_renamed(document, old)),
    )


def _overrides(config: PatchConfig, patch: Patch) -> Iterator[Override]:
    kind = patch.patch_type.value
    if kind in (PatchType.INIT_MODIFICATION.value, PatchType.CLASS_MAPPING.value):
        yield Override(f"{patch.target}.__init__", kind, config.name)
    elif kind != PatchType.METHOD_ADDITION.value:
        yield Override(patch.target, kind, config.name)
    for name in patch.relies_on:
        yield Override(name, "relies_on", config.name)


def _body(document: Document, name: str, scope: Scope, *, overridden: bool) -> Body | None:
    # If two definitions have the same name, the later one is used.
    definition = next(reversed(document.find(name)), None)
    if definition is None:
        return None
    node = definition.node
    text = reindent(_without_docstrings(document, node), document.indent(node), "")
    line = document.lineno(document.span(node)[0])
    form = _form(definition, scope) if overridden else ""
    said = {name: renamed for name, function in own_functions(node) if (renamed := renames(function))}
    return Body(fingerprint(node), signature(node), line, tuple(text.splitlines()), form, said)


def _form(definition: Definition, scope: Scope) -> str:
    """Digest of what a function computes, including attribute names, because an override uses these."""
    node, owner = definition.node, definition.parents[-1]
    if not isinstance(node, FUNCTIONS):
        return ""
    form = canonical(node, scope, owner if isinstance(owner, ast.ClassDef) else None)
    if not isinstance(form, Form):
        return ""
    keys = [root.key for root in (form.result, *form.effects)]
    return blake2b(b"".join(keys), digest_size=8).hexdigest()


def _without_docstrings(document: Document, node: ast.AST) -> str:
    """The text of a definition without docstrings, which are over half of it and do not matter."""
    start, end = document.span(node)
    parts = []
    for inner in walk_ast(node):
        if isinstance(inner, (*FUNCTIONS, ast.ClassDef)) and has_docstring(inner) and len(inner.body) > 1:
            docstring, following = inner.body[0], inner.body[1]
            if document.begins_line(docstring) and document.begins_line(following):
                parts.append((document.line_start(document.start(docstring)), document.end(docstring)))
    text = ""
    for first, last in sorted(parts):
        text += document.source[start:first]
        start = document.next_line(last)
    return text + document.source[start:end]


def _renamed(document: Document, old: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    gone = {digest: name for name, digest in old.items() if not document.find(name)}
    if not gone:
        return
    for definition in document.definitions():
        name = gone.get(fingerprint(definition.node)) if definition.kind != "assignment" else None
        if name is not None:
            yield name, definition.qualname
