"""`VEOMNI_DUMP_PATCHED=1`: write every patched module and its unified diff, one log line each."""

from __future__ import annotations

import os
from importlib.util import decode_source

from veomni_hook.cache.trusted_folder import Defect, Root
from veomni_hook.finders.build import patch_with_idioms
from veomni_hook.finders.configs import load_for, with_registered
from veomni_hook.finders.log import say, warn
from veomni_hook.finders.outcome import Outcome
from veomni_hook.finders.upstream import Upstream
from veomni_hook.ownership import swap_problem
from veomni_hook.patches.render import dump_text, unified_diff
from veomni_hook.settings import Settings


class Folder(Root):
    """A folder for people to read: the umask decides who may read it; only its owner may write."""

    __slots__ = ()
    folder_mode = 0o755
    file_mode = 0o644
    private_group = True


def open_folder(path: str) -> Folder:
    """Open a folder of this user for writing; create it if missing.

    Raises:
        OSError: it cannot be created or opened.
        Defect: another user could have written to it or could replace it, or it is a symbolic link.
    """
    path = os.path.abspath(os.path.expanduser(path))
    if problem := swap_problem(path, what="it", owners=True):
        raise Defect(problem)
    return Folder.create(path)


def dump(upstream: Upstream, settings: Settings, outcome: Outcome) -> None:
    """Write `<dump_dir>/<module path>.py` and `.diff`.

    The text is the one that is executed. The module is patched again for the diff. No symbolic link is
    followed, neither `dump_dir` nor anything in it. A folder that cannot be written, or that another user
    could write or replace, causes a warning.
    """
    _, loaded = load_for(upstream.module, settings)
    patched, _ = patch_with_idioms(upstream, with_registered(loaded), settings)
    if patched is None:
        return
    text = outcome.text
    if text is None:
        with open(outcome.stored or "", encoding="utf-8", newline="") as file:
            text = file.read()
    parts = upstream.module.split(".")
    name = "/".join(parts[1:] or parts)
    diff = unified_diff(decode_source(upstream.data), patched, upstream.module)
    try:
        with open_folder(settings.dump_dir) as folder:
            if "/" in name:
                folder.make_folders(name.rpartition("/")[0])
            for suffix, written in ((".py", dump_text(text, upstream.module)), (".diff", diff)):
                folder.write(f"{name}{suffix}", written.encode())
    except (OSError, Defect) as error:
        warn(
            f"the patched source of {upstream.module} cannot be dumped to {settings.dump_dir}: {error}. "
            "Name a folder of your own in VEOMNI_DUMP_DIR"
        )
        return
    path = os.path.join(settings.dump_dir, *name.split("/")) + ".py"
    say(f"dumped {upstream.module}: {path}, {path[:-3]}.diff")
