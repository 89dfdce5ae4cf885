"""Fixtures of the cache tests: a store in a fresh folder, publishing with defaults, work in child processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.processes import environment
from veomni_hook.cache import lease
from veomni_hook.cache.inputs import observe
from veomni_hook.cache.store import Hit, NotStored, Store

KEY = "ab" * 20
OWN = "0f" * 20  # of an entry that KEY repeats, as long as its inputs hold
MODULE = "pkg.models.one.modeling_one"
TEXT = "# patched\ndef answer():\n    return 'größer'\n"
NOBODY = 65534
TEMPORARY = tempfile.gettempdir()  # before a test changes it


class Publisher:
    """Publishes and looks up one module, with defaults for everything that a test does not care about."""

    key = KEY
    module = MODULE
    text = TEXT

    def __call__(self, store: Store, **changes: Any) -> Hit | NotStored:
        fields: dict[str, Any] = {
            "module": MODULE,
            "distribution": "pkg",
            "version": "1.2.3",
            "patch_hash": "c0ffee",
            "text": TEXT,
            "report": {"applied": [{"target": "answer"}]},
        }
        key, inputs = changes.pop("key", KEY), changes.pop("inputs", None)
        if inputs is None:
            return store.publish(key, **{**fields, **changes})
        published = store.publish(OWN, **{**fields, **changes})
        store.repeat(key, OWN, inputs)
        return published

    def unpatched(
        self, store: Store, module: str, inputs: Mapping[tuple[str, str], str], key: str = KEY
    ) -> None:
        """Store that nothing applies to a module, as long as inputs hold."""
        store.publish_unpatched(OWN, module)
        store.repeat(key, OWN, inputs)

    def hit(self, store: Store, **changes: Any) -> Hit:
        published = self(store, **changes)
        assert isinstance(published, Hit), published
        return published


def inputs_of(file: Path, text: str) -> Mapping[tuple[str, str], str]:
    """A file, which is written, as what a config was read from."""
    file.write_text(text)
    return {("file", str(file)): observe("file", str(file))}


@pytest.fixture
def publish():
    return Publisher()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def store(root):
    return Store(root)


@pytest.fixture(autouse=True)
def no_lease_survives():
    yield
    for _, holder in list(lease._held.values()):
        lease.release(holder)


def run_in_child(work: Callable[[], Any], *, user: int | None = None) -> Any:
    """The JSON result of `work`, run in a forked child, as another user if asked for."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if user is not None and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            answer = {"result": work()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(writing, json.dumps(answer).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = json.loads(pipe.readline())  # not to its end: a grandchild may hold it open
    os.waitpid(child, 0)
    assert "error" not in answer, answer["error"]
    return answer["result"]


@pytest.fixture
def in_child():
    return run_in_child


@pytest.fixture
def open_folder():
    """A folder that an unprivileged child reaches (pytest's own are private); its owner is that child's user."""
    folder = Path(tempfile.mkdtemp(dir=TEMPORARY))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def waiting(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that has printed ``ready`` and goes on at a line of input."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def go_on(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Let processes go on, once each while they all run; they must end well, and end with the test."""
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.close()
        while any(process.poll() is None for process in processes):
            yield
        for process in processes:
            assert process.wait() == 0 and process.stdout is not None
            process.stdout.close()
    finally:
        for process in processes:
            process.kill()
