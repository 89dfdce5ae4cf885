"""Child processes: the environment in which a fresh interpreter activates the hook by itself.

A folder with a `sitecustomize` goes to the front of PYTHONPATH. Every Python started from that environment
(multiprocessing's spawn and forkserver, torchrun's workers, subprocess) runs it, takes the folder out of
`sys.path` again, runs the `sitecustomize` that it hid, and activates. `python -S`, `-I` and `-E` ask for no
such thing and get none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from veomni_hook.settings import ENVIRONMENT, Settings

BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")


def environment(settings: Settings, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables to set so that children inherit the hook with these settings.

    Args:
        settings: every field that differs from its default travels in its own variable.
        environ: the environment that the children start from; `os.environ` by default.
    """
    environ = os.environ if environ is None else environ
    path = environ.get("PYTHONPATH", "")
    entries = path.split(os.pathsep) if path else []  # an empty entry means the working directory
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    entries = [BOOTSTRAP, *(part for part in entries if part != BOOTSTRAP)]
    if os.path.basename(root) not in ("site-packages", "dist-packages") and root not in entries:
        entries.append(root)
    variables = {"PYTHONPATH": os.pathsep.join(entries)}
    for name, variable in ENVIRONMENT.items():
        value = getattr(settings, name)
        if value != getattr(Settings, name):
            variables[variable] = _spell(value)
    variables[ENVIRONMENT["enabled"]] = "1" if settings.enabled else "0"
    return variables


def _spell(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)
