"""`clear` removes what is the cache's and unused, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from veomni_hook.cache import clearing, lease
from veomni_hook.cache.inventory import TRASH_PREFIX
from veomni_hook.cache.store import Hit, Miss, NotStored, Store

from .conftest import KEY, MODULE, Publisher

OTHER = "cd" * 20


def _unused(store: Store, publish: Publisher, **changes: str) -> None:
    publish.hit(store, **changes)
    lease.release(store.root)


def test_clear_removes_entries_manifests_and_empty_folders(store: Store, root: Path, publish: Publisher) -> None:
    _unused(store, publish)
    store.publish_unpatched(OTHER, "pkg.three", {})
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    cleared = store.clear()
    assert cleared.removed == (str(root / "pkg-1.2.3/c0ffee"),)
    assert (cleared.manifests, cleared.freed, cleared.in_use, cleared.failed) == (2, size, (), ())
    assert os.listdir(root) == []
    assert isinstance(store.lookup(KEY, MODULE), Miss)
    publish.hit(store)


USER = """
import sys
from veomni_hook.cache.store import Hit, Store
hit = Store(sys.argv[1]).lookup(sys.argv[2], sys.argv[3])
assert isinstance(hit, Hit), hit
print(hit.path, flush=True)
sys.stdin.readline()
print(open(hit.path, encoding="utf-8").read() == hit.source(), flush=True)
"""


@pytest.fixture
def running(store: Store, publish: Publisher, package_path: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that got a hit on the entry and runs on."""
    _unused(store, publish)
    process = subprocess.Popen(
        [sys.executable, "-c", USER, store.root, KEY, MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": package_path},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(store.root)
        yield process
        process.communicate()


def test_clear_spares_what_a_running_process_uses(
    store: Store, root: Path, publish: Publisher, running: subprocess.Popen[str]
) -> None:
    _unused(store, publish, key=OTHER, patch_hash="unused")
    cleared = store.clear()
    assert [item.path for item in cleared.in_use] == [str(root / "pkg-1.2.3/c0ffee")]
    assert cleared.removed == (str(root / "pkg-1.2.3/unused"),)
    assert running.communicate("\n")[0] == "True\n"
    found = store.lookup(KEY, MODULE)
    assert isinstance(found, Hit)
    lease.release(store.root)
    assert store.clear().in_use == ()


def test_forced_clear_takes_used_entries_too(
    store: Store, root: Path, running: subprocess.Popen[str]
) -> None:
    cleared = store.clear(force=True)
    assert cleared.removed == (str(root / "pkg-1.2.3/c0ffee"),)
    assert cleared.in_use == ()
    assert os.listdir(root) == []


def test_process_does_not_clear_what_it_uses_itself(store: Store, publish: Publisher) -> None:
    publish.hit(store)
    assert len(store.clear().in_use) == 1
    assert isinstance(store.lookup(KEY, MODULE), Hit)


def test_failed_lookup_keeps_nothing_in_use(store: Store, root: Path, publish: Publisher) -> None:
    _unused(store, publish)
    (root / "pkg-1.2.3/c0ffee/models/one/modeling_one.py").write_bytes(b"")
    assert isinstance(store.lookup(KEY, MODULE), Miss)
    assert store.clear().in_use == ()


def test_unrelated_files_and_folders_stay(store: Store, root: Path, publish: Publisher) -> None:
    _unused(store, publish)
    for name in ("notes.txt", "project/src/main.py", "pkg-1.2.3/mine/file", ".hidden/sub/.lease"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("precious")
    store.clear(force=True)
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    assert files == [".hidden/sub/.lease", "notes.txt", "pkg-1.2.3/mine/file", "project/src/main.py"]


@pytest.mark.parametrize("name", ["pkg-1.2.3", "pkg-1.2.3/c0ffee"])
def test_link_is_removed_and_its_target_spared(
    store: Store, root: Path, publish: Publisher, name: str, tmp_path: Path
) -> None:
    _unused(store, publish)
    (root / name).rename(tmp_path / "elsewhere")
    (root / name).symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    assert len(store.clear().removed) == 1
    assert os.listdir(root) == []
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before


def test_defective_entries_and_manifests_are_removed(store: Store, root: Path, publish: Publisher) -> None:
    _unused(store, publish)
    _unused(store, publish, key=OTHER, patch_hash="other")
    (root / "keys" / OTHER).write_bytes(b"")
    (root / "pkg-1.2.3/c0ffee").chmod(0o777)
    assert len(store.clear().removed) == 2
    assert os.listdir(root) == []


def test_leftovers_of_killed_processes_are_removed(store: Store, root: Path, publish: Publisher) -> None:
    _unused(store, publish)
    (root / "keys" / ".old.tmp").write_bytes(b"")
    os.utime(root / "keys" / ".old.tmp", (1, 1))
    (root / "keys" / ".new.tmp").write_bytes(b"")
    (root / f"{TRASH_PREFIX}1/sub").mkdir(parents=True)
    store.clear()
    assert sorted(os.listdir(root)) == ["keys"]
    assert os.listdir(root / "keys") == [".new.tmp"]


def test_what_cannot_be_removed_is_reported(
    store: Store, root: Path, publish: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    _unused(store, publish)

    def fail(*arguments: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "replace", fail)
    cleared = store.clear()
    assert [(item.path, item.reason) for item in cleared.failed] == [
        (str(root / "pkg-1.2.3/c0ffee"), "Operation not permitted")
    ]
    monkeypatch.undo()
    assert isinstance(store.lookup(KEY, MODULE), Hit)


def test_entry_is_moved_aside_before_it_is_taken_apart(
    store: Store, root: Path, publish: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    _unused(store, publish)
    seen: list[object] = []

    def look(root_: clearing.Root, name: str) -> None:
        seen.extend((name.startswith(TRASH_PREFIX), store.lookup(KEY, MODULE), publish(store)))

    monkeypatch.setattr(clearing.Root, "remove_tree", look)
    store.clear()
    aside, missed, published = seen
    assert aside is True
    assert isinstance(missed, Miss)
    assert isinstance(published, Hit)
    assert os.path.exists(published.path)


def test_publishing_and_clearing_at_once_never_break_each_other(store: Store, publish: Publisher) -> None:
    end = time.monotonic() + 1.5
    problems: list[object] = []
    hits = [0]

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                while time.monotonic() < end:
                    work()
            except BaseException as error:
                problems.append(error)

        return run

    def write() -> None:
        answer = publish(store)
        if isinstance(answer, NotStored):
            problems.append(answer)
        elif not os.path.exists(answer.path):
            problems.append("published, then gone")

    def read() -> None:
        answer = store.lookup(KEY, MODULE)
        if isinstance(answer, Hit):
            hits[0] += 1
            if not os.path.exists(answer.path) or answer.source() != publish.text:
                problems.append("hit, then gone")

    def clear() -> None:
        # The entry's table of leases is this process's own: a lease is given up only between two uses.
        cleared = Store(store.root).clear()
        problems.extend(cleared.failed)

    def let_go() -> None:
        time.sleep(0.05)

    threads = [threading.Thread(target=guarded(work)) for work in (write, write, read, clear, let_go)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert hits[0] > 0
