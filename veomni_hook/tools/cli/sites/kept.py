"""Results of idioms for modules, cached between commands so that `list` can show them at once.

One JSON file in the cache folder holds the result for each module, with the digest of its source. The file's
name is a digest of this package's code, the interpreter and the transformers folder, so results
become invalid when one of these changes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import source_hash

from veomni_hook.cache.key import digest, engine_digest, interpreter_tag
from veomni_hook.cache.store import Store
from veomni_hook.cache.trusted_folder import Defect, Root
from veomni_hook.layout import counted
from veomni_hook.patches.idioms.recognise import OPTIONAL
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.sources import SourceTree
from veomni_hook.tools.cli.sites.survey import FEW
from veomni_hook.tools.cli.sites.table import Table, examined
from veomni_hook.tools.coverage import ERROR, Row
from veomni_hook.tools.facts import Facts

FOLDER = "surveys"
MOST_FILES = 4  # one for each environment that shares the cache folder


def site_table(tree: SourceTree, files: Mapping[str, str], store: Store, jobs: int | None = None) -> Table:
    """Return the table of modules, as `table.examined` does.

    Results from the same code and the same source are read from the cache folder. Failures are not cached.

    Args:
        tree: the transformers package.
        files: module names with their files.
        store: the cache.
        jobs: how many processes.

    Raises:
        VeomniHookError: a worker process was killed.
    """
    output.note(f"transformers {tree.version}, {counted(len(files), 'module')}")
    parts = (engine_digest(), *OPTIONAL, interpreter_tag(), sys.version, tree.folder)
    name = f"{digest(chr(0).join(parts).encode())}.json"
    kept = _read(store, name)
    seals = {module: _seal(path) for module, path in files.items()}
    known = {
        module: [Row(*fields) for fields in kept[module]["rows"]]
        for module, seal in seals.items()
        if seal and module in kept and kept[module]["seal"] == seal
    }
    missing = {module: path for module, path in files.items() if module not in known}
    if len(missing) > FEW:
        result = "; the result is kept" if store.mode == "disk" else ""
        output.note(f"examining {counted(len(missing), 'module')}, which takes some seconds{result}")
    fresh = examined(missing, jobs) if missing else {}
    added = {
        module: {"seal": seals[module], "rows": [[*asdict(row).values()] for row in rows]}
        for module, rows in fresh.items()
        if seals[module] and all(row.status != ERROR for row in rows)
    }
    if added and store.mode == "disk":
        _write(store, name, {**kept, **added})
    return {module: known[module] if module in known else fresh[module] for module in files}


def forget(store: Store) -> int:
    """Remove the cached results; return the number of bytes freed."""
    freed = 0
    try:
        with Root(store.root) as root:
            root.check_folders(FOLDER)
            for name in root.names(FOLDER):
                freed += root.status(f"{FOLDER}/{name}").st_size
                root.unlink(f"{FOLDER}/{name}")
            root.rmdir(FOLDER)
    except (Defect, OSError):
        return freed  # there is none, or another `clear` was faster
    return freed


def _seal(path: str) -> str:
    """The digest of a file's bytes; empty if it cannot be read, which the survey reports."""
    try:
        with open(path, "rb", buffering=0) as file:
            return source_hash(file.read()).hex()
    except OSError:
        return ""


def _read(store: Store, name: str) -> dict[str, Facts]:
    """The cached results; empty if they cannot be read or another user could have written them."""
    if store.mode != "disk":
        return {}
    try:
        with Root(store.root) as root:
            root.check_folders(FOLDER)
            kept: dict[str, Facts] = json.loads(root.read(f"{FOLDER}/{name}"))
            return kept
    except (Defect, OSError, ValueError):
        return {}


def _write(store: Store, name: str, kept: Mapping[str, object]) -> None:
    try:
        with Root.create(store.root) as root:
            root.make_folders(FOLDER)
            root.write(f"{FOLDER}/{name}", json.dumps(kept, separators=(",", ":")).encode())
            age = {one: root.status(f"{FOLDER}/{one}").st_mtime for one in root.names(FOLDER)}
            for old in sorted(age, key=age.__getitem__)[:-MOST_FILES]:
                root.unlink(f"{FOLDER}/{old}")
    except (Defect, OSError) as error:
        output.warn(f"the result is not kept: {error}")
