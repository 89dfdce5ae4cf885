"""Results that several workers of pytest need: the first that asks makes one, the others read it."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder of this run of pytest, the same one for all of its workers."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], T]) -> T:
    """What ``make`` returns, called by one worker; it must survive pickling. An error is raised in each worker."""
    folder = shared_folder(factory)
    path = folder / f"{name}.pickle"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            written = path.with_suffix(".tmp")
            written.write_bytes(pickle.dumps(make()))
            written.rename(path)
    found: T = pickle.loads(path.read_bytes())
    return found
