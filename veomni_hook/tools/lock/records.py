"""The content of a lock, and its file format: sorted JSON with a line for each line of source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from veomni_hook.errors import LockError
from veomni_hook.patches.code.renames import Rename
from veomni_hook.tools.facts import Facts

__all__ = ["SCHEMA", "Body", "Lock", "LockedModule", "LockedSite", "Override", "dumps", "loads"]

#: Version of the file format. This release cannot read a file with another number.
SCHEMA = 1
_ABOUT = "Written by `veomni-hook check --write-lock`, compared by `veomni-hook check`. Do not edit."


@dataclass(frozen=True, slots=True)
class Body:
    """The upstream text of a definition.

    Attributes:
        fingerprint: digest of what it does, see `veomni_hook.patches.code.comparison`.
        signature: its parameters without annotations; for a class those of every method, one per line.
        line: its first line.
        text: its lines with decorators and comments, without docstrings, not indented.
        form: digest of what it computes, if it is straight-line code and a config overrides it.
        renames: what upstream says of renamed parameters: of a function under an empty name, in a class by
            method. It describes the installed module only and is not written.
    """

    fingerprint: str
    signature: str
    line: int
    text: tuple[str, ...]
    form: str = ""
    renames: Mapping[str, Mapping[str, Rename]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class LockedSite:
    """A place that an idiom routes to a kernel slot.

    Attributes:
        op: the op's name.
        target: the target that a patch would name.
        variant: the formula.
        form: digest of what the code computes.
        bodies: names of the definitions that the site consists of, the target's first.
        calls: the arguments of the calls that are put into upstream's code, by function and parameter.
    """

    op: str
    target: str
    variant: str
    form: str
    bodies: tuple[str, ...] = ()
    calls: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, order=True, slots=True)
class Override:
    """One of the project's own patches that depends on upstream code.

    Attributes:
        target: the upstream definition.
        kind: the verb.
        config: the config's name.
    """

    target: str
    kind: str
    config: str


@dataclass(frozen=True, slots=True)
class LockedModule:
    """One module: routed sites, overridden definitions, and the text of both by qualified name.

    ``unrouted`` (op and target to the reason) and ``renamed`` (an old name to a new one of the same body)
    describe the installed module only and are not written.
    """

    sites: tuple[LockedSite, ...] = ()
    overrides: tuple[Override, ...] = ()
    bodies: Mapping[str, Body] = field(default_factory=dict)
    unrouted: Mapping[tuple[str, str], str] = field(default_factory=dict, compare=False)
    renamed: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Lock:
    """A project's lock.

    Attributes:
        transformers: the release of the modules.
        engine: digest of the code that made the forms; forms of other engines are not comparable.
        families: the families that the user named; empty means all of transformers.
        modules: by name; those without a site or an override are omitted.
    """

    transformers: str
    engine: str
    families: tuple[str, ...]
    modules: Mapping[str, LockedModule]


def dumps(lock: Lock) -> str:
    """Return the lock as the text of a file."""
    modules = {}
    for name, module in lock.modules.items():
        shown = asdict(module)
        del shown["unrouted"], shown["renamed"]
        for body in shown["bodies"].values():
            del body["renames"]
        modules[name] = shown
    content = {
        "about": _ABOUT,
        "schema": SCHEMA,
        "transformers": lock.transformers,
        "engine": lock.engine,
        "families": lock.families,
        "modules": dict(sorted(modules.items())),
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def loads(text: str, where: str) -> Lock:
    """Read the text of a lock file.

    Args:
        text: the file's text.
        where: the file's name, for errors.

    Raises:
        LockError: it is not a lock, or has another schema.
    """
    fix = "remove it, and write it anew: veomni-hook check --write-lock"
    try:
        content = json.loads(text)
        schema = content["schema"]
    except (ValueError, TypeError, KeyError) as error:
        raise LockError(
            f"the file is no lock: {type(error).__name__}: {error}", where=where, fix=fix
        ) from error
    if schema != SCHEMA:
        known = f"this release of veomni-hook reads schema {SCHEMA}"
        raise LockError(f"the lock has schema {schema!r}; {known}", where=where, fix=fix)
    try:
        return Lock(
            content["transformers"],
            content["engine"],
            tuple(content["families"]),
            {name: _module(record) for name, record in content["modules"].items()},
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise LockError(
            f"the lock is damaged: {type(error).__name__}: {error}", where=where, fix=fix
        ) from error


def _module(held: Facts) -> LockedModule:
    return LockedModule(
        tuple(LockedSite(**{**site, "bodies": tuple(site["bodies"])}) for site in held["sites"]),
        tuple(Override(**one) for one in held["overrides"]),
        {name: Body(**{**body, "text": tuple(body["text"])}) for name, body in held["bodies"].items()},
    )
