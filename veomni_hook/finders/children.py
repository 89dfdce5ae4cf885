"""Child processes: the environment that makes a fresh interpreter activate the hook.

A folder with a `sitecustomize` is put first in PYTHONPATH. Every Python started with that environment
(multiprocessing's spawn and forkserver, torchrun's workers, subprocess) runs it: it removes the folder from
`sys.path`, runs the `sitecustomize` that it hid, and activates the hook. `python -S`, `-I` and `-E` disable
this mechanism. docs/children.md describes what children inherit without it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # activation imports this module, so it is cheap; `environment` imports settings
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from veomni_hook.settings import Settings

    #: What `put` changed in an environment, so that `take_out` can undo exactly that: the new and the
    #: previous value of each changed variable (None: it was not set), and what was added to PYTHONPATH.
    Inherited = tuple[dict[str, tuple[str, str | None]], list[str]]

__all__ = ["BOOTSTRAP", "environment", "is_inherited", "put", "take_out"]

BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")
_PATH = "PYTHONPATH"


def environment(settings: Settings, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables to set so that children inherit the hook with these settings.

    Args:
        settings: every field that differs from its default gets its own variable.
        environ: the environment that the children start from; `os.environ` by default.
    """
    from veomni_hook.settings import ENVIRONMENT  # activation loads this module and must stay light

    environ = os.environ if environ is None else environ
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    entries = [BOOTSTRAP, *(part for part in _entries(environ) if part != BOOTSTRAP)]
    if os.path.basename(root) not in ("site-packages", "dist-packages") and root not in entries:
        entries.append(root)
    variables = {_PATH: os.pathsep.join(entries)}
    for name, variable in ENVIRONMENT.items():
        value = getattr(settings, name)
        if value != getattr(type(settings), name):
            variables[variable] = _spell(value)
    variables[ENVIRONMENT["enabled"]] = "1" if settings.enabled else "0"
    return variables


def is_inherited(environ: Mapping[str, str]) -> bool:
    """Whether children of this environment already activate the hook."""
    return BOOTSTRAP in _entries(environ)


def put(settings: Settings, environ: MutableMapping[str, str]) -> Inherited:
    """Add the hook with these settings to an environment; return what was changed, for `take_out`."""
    wanted = environment(settings, environ)
    before = _entries(environ)
    pairs = {name: (value, environ.get(name)) for name, value in wanted.items()}
    environ.update(wanted)
    changed = {name: (now, then) for name, (now, then) in pairs.items() if now != then}
    return changed, [entry for entry in _entries(environ) if entry not in before]


def take_out(inherited: Inherited, environ: MutableMapping[str, str]) -> None:
    """Undo a `put`; keep what others have changed since."""
    variables, added = inherited
    for name, (ours, before) in variables.items():
        if environ.get(name) == ours:
            _restore(environ, name, before)
        elif name == _PATH:
            entries = _entries(environ)
            for entry in added:
                if entry in entries:
                    entries.remove(entry)
            nothing = None if before is None else ""
            _restore(environ, name, os.pathsep.join(entries) if entries else nothing)


def _entries(environ: Mapping[str, str]) -> list[str]:
    path = environ.get(_PATH, "")
    return path.split(os.pathsep) if path else []  # an empty entry means the working directory


def _restore(environ: MutableMapping[str, str], name: str, value: str | None) -> None:
    if value is None:
        environ.pop(name, None)
    else:
        environ[name] = value


def _spell(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)
