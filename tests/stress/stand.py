"""Starts of a small program on a cache folder: forked, watched, and held against what they have to come to.

A start activates the hook and imports four modules of the stand-in package in tests/data/hub: three that are
patched and one that is known to need no patch. `environment` has to be that of the process that forks them.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from types import CodeType
from typing import Any

from tests import processes

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
#: What a start imports. Of the circular pair, the first brings the second.
MODULES = (
    "transformers.models.tiny.modeling_tiny",
    "transformers.models.pair_a.modeling_pair_a",
    "transformers.models.still.modeling_still",
)
#: The modules of which the cache keeps an entry, and a manifest that no patch applies to the last one.
PATCHED = (MODULES[0], MODULES[1], "transformers.models.pair_b.modeling_pair_b")
#: What the imported modules have to compute.
VALUES = {"tiny": 103, "pair": ["patched a", "patched b"], "still": 7}

#: Seconds after which a start hangs.
PATIENCE = 60

Started = dict[str, Any]


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process that starts programs: the stand-in package, its patches, nothing of the user's."""
    return processes.environment(
        folder / "cache", PYTHONPATH=os.pathsep.join(map(str, (DATA / "hub", DATA / "configs", ROOT))),
        PYTHONDONTWRITEBYTECODE="1", VEOMNI_PATCHES="tiny_config",
    )  # fmt: skip


def prepare(folder: Path) -> None:
    """Start once in this process and undo it, so that whatever a start imports is there and a fork is quick."""
    import transformers

    import veomni_hook.cache.inventory  # noqa: F401
    from veomni_hook.cache import lease
    from veomni_hook.finders.state import STATE

    if not str(transformers.__file__).startswith(str(DATA)):
        raise RuntimeError(f"transformers is {transformers.__file__}, not the stand-in of the tests")
    scratch = str(folder / "scratch")
    outcome(Path(scratch))
    lease.release(scratch)
    STATE.reset()
    for name in [name for name in sys.modules if name.startswith("transformers.models.")]:
        del sys.modules[name]


def outcome(cache: Path) -> Started:
    """Start in this process: what the modules compute, what was executed, and where it came from."""
    import veomni_hook

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = veomni_hook.activate(cache_dir=str(cache))
        tiny, pair, still = (importlib.import_module(name) for name in MODULES)
    found: Started = {
        "values": {
            "tiny": tiny.TinyNorm().forward(1),
            "pair": list(pair.both()),
            "still": still.Still().forward(7),
        }
    }
    found["warnings"] = [str(one.message) for one in caught]
    outcomes = handle.status().modules
    found["cache"] = {name: outcomes[name].cache for name in PATCHED}
    found["reasons"] = {name: outcomes[name].reason for name in PATCHED}
    found["stored"] = {name: outcomes[name].stored for name in PATCHED}
    loaders = {name: sys.modules[name].__spec__.loader for name in PATCHED}
    found["texts"] = {name: _digest(loader.get_source(name).encode()) for name, loader in loaders.items()}
    found["codes"] = {
        name: _digest(_spelled(loader.get_code(name)).encode()) for name, loader in loaders.items()
    }
    return found


def expected(found: Started) -> Started:
    """What every start has to agree on, whatever the cache held."""
    return {name: found.get(name) for name in ("values", "texts", "codes")}


def fork(work: Callable[[], Any]) -> tuple[int, int]:
    """Run `work` in a forked child: its process id, and a descriptor of the pipe with its JSON result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    status = 1
    try:
        os.close(reading)
        try:
            answer = {"result": work()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        status = 0
    finally:
        os._exit(status)


def wait(child: int, reading: int, *, may_be_killed: bool = False) -> Any:
    """The result of a forked child; None when it was killed, which is an error unless it may be."""
    if not select.select([reading], [], [], PATIENCE)[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        return {"error": f"a start did not end within {PATIENCE} s"}
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if may_be_killed and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    if status:
        raise RuntimeError(f"a start ended with status {status}")
    answer = json.loads(text)
    return {"error": answer["error"]} if "error" in answer else answer["result"]


def start(cache: Path, before: Callable[[], Any] = lambda: None) -> Started:
    """Start in a forked child; `before` runs there first. What goes wrong is in the key ``error``."""

    def work() -> Started:
        before()
        return outcome(cache)

    found: Started = wait(*fork(work))
    return found


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=12).hexdigest()


def _spelled(code: CodeType) -> str:
    """What a code object does, without the name of its file; marshal's bytes differ between processes."""
    constants = [_spelled(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return f"{code.co_name} {code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"
