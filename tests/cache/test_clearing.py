"""`clear` removes what is the cache's and unused, and nothing else."""

from __future__ import annotations

import os
import time

import pytest

from veomni_hook.cache import entry, lease
from veomni_hook.cache.inventory import TRASH_PREFIX
from veomni_hook.cache.store import Hit, Miss
from veomni_hook.cache.trusted_folder import Root

from .conftest import KEY, MODULE, go_on, waiting

OTHER = "cd" * 20


def _unused(store, publish, **changes):
    publish.hit(store, **changes)
    lease.release(store.root)


def test_clear_removes_entries_manifests_and_empty_folders(store, root, publish):
    _unused(store, publish)
    store.publish_unpatched(OTHER, "pkg.three")
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
print("ready", flush=True)
sys.stdin.readline()
print(open(hit.path, encoding="utf-8").read() == hit.source(), flush=True)
"""


@pytest.fixture
def running(store, publish):
    """Another process that got a hit on the entry and runs on."""
    _unused(store, publish)
    with waiting(USER, store.root, KEY, MODULE) as process:
        yield process
        process.communicate()


def test_clear_spares_what_a_running_process_uses(store, root, publish, running):
    _unused(store, publish, key=OTHER, patch_hash="unused")
    cleared = store.clear()
    assert [item.path for item in cleared.in_use] == [str(root / "pkg-1.2.3/c0ffee")]
    assert cleared.removed == (str(root / "pkg-1.2.3/unused"),)
    assert running.communicate("\n")[0] == "True\n"
    found = store.lookup(KEY, MODULE)
    assert isinstance(found, Hit)
    lease.release(store.root)
    assert store.clear().in_use == ()


def test_forced_clear_takes_used_entries_too(store, root, running):
    cleared = store.clear(force=True)
    assert (cleared.removed, cleared.in_use) == ((str(root / "pkg-1.2.3/c0ffee"),), ())
    assert os.listdir(root) == []


def test_process_does_not_clear_what_it_uses_itself(store, root, publish):
    published = publish.hit(store)
    assert len(store.clear().in_use) == 1
    assert isinstance(store.lookup(KEY, MODULE), Hit)
    lease.release(store.root)
    (root / published.path).write_bytes(b"")
    assert isinstance(store.lookup(KEY, MODULE), Miss)
    assert store.clear().in_use == (), "a failed lookup keeps nothing in use"


def test_unrelated_files_and_folders_stay(store, root, publish):
    _unused(store, publish)
    for name in ("notes.txt", "project/src/main.py", "pkg-1.2.3/mine/file", ".hidden/sub/.lease"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("precious")
    store.clear(force=True)
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    assert files == [".hidden/sub/.lease", "notes.txt", "pkg-1.2.3/mine/file", "project/src/main.py"]


@pytest.mark.parametrize("name", ["pkg-1.2.3", "pkg-1.2.3/c0ffee"])
def test_link_is_removed_and_its_target_spared(store, root, publish, name, tmp_path):
    _unused(store, publish)
    (root / name).rename(tmp_path / "elsewhere")
    (root / name).symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    assert len(store.clear().removed) == 1
    assert os.listdir(root) == []
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before


def test_defective_entries_and_manifests_are_removed(store, root, publish):
    _unused(store, publish)
    _unused(store, publish, key=OTHER, patch_hash="other")
    (root / "keys" / OTHER).write_bytes(b"")
    (root / "pkg-1.2.3/c0ffee").chmod(0o777)
    assert len(store.clear().removed) == 2
    assert os.listdir(root) == []


def test_leftovers_of_killed_processes_are_removed(store, root, publish):
    _unused(store, publish)
    (root / "keys" / ".old.tmp").write_bytes(b"")
    os.utime(root / "keys" / ".old.tmp", (1, 1))
    (root / "keys" / ".new.tmp").write_bytes(b"")
    (root / f"{TRASH_PREFIX}1/sub").mkdir(parents=True)
    store.clear()
    assert sorted(os.listdir(root)) == ["keys"]
    assert os.listdir(root / "keys") == [".new.tmp"]


def test_what_cannot_be_removed_is_reported(store, root, publish, monkeypatch):
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


def test_entry_is_moved_aside_before_it_is_taken_apart(store, root, publish, monkeypatch):
    _unused(store, publish)
    seen: list[object] = []

    def look(root_: Root, name: str) -> None:
        if not seen:
            seen.extend((name.startswith(TRASH_PREFIX), store.lookup(KEY, MODULE), publish(store)))

    monkeypatch.setattr(Root, "remove_tree", look)
    store.clear()
    aside, missed, published = seen
    assert aside is True
    assert isinstance(missed, Miss)
    assert isinstance(published, Hit)
    assert isinstance(store.lookup(KEY, MODULE), Hit), "what was published meanwhile stays"


CLEARER = """
import sys
from veomni_hook.cache.store import Store
print("ready", flush=True)
sys.stdin.readline()
removed = 0
while removed < 10:
    cleared = Store(sys.argv[1]).clear()
    assert not cleared.failed, cleared.failed
    removed += len(cleared.removed)
"""


def test_publishing_and_clearing_at_once_never_break_each_other(store, publish):
    for _ in go_on(*(waiting(CLEARER, store.root) for _ in range(2))):
        published = publish(store)
        assert isinstance(published, Hit), published
        assert os.path.exists(published.path)
        lease.release(store.root)
        found = store.lookup(KEY, MODULE)
        if isinstance(found, Hit):
            assert os.path.exists(found.path)
            assert found.source() == publish.text
        lease.release(store.root)
        time.sleep(0.001)  # the moment in which nobody uses the entry


def test_an_entry_that_is_published_again_before_it_is_locked_stays(store, publish, monkeypatch):
    _unused(store, publish)
    lock = lease._lock

    def late(descriptor: int, *, alone: bool) -> bool:
        """Another `clear` and a writer come between opening the lock file and locking it."""
        monkeypatch.setattr(lease, "_lock", lock)
        assert len(store.clear().removed) == 1
        publish.hit(store)
        return lock(descriptor, alone=alone)

    monkeypatch.setattr(lease, "_lock", late)
    cleared = store.clear()
    assert not cleared.removed and not cleared.failed
    assert isinstance(store.lookup(KEY, MODULE), Hit)


def test_what_is_published_while_its_folder_is_moved_is_in_use(store, publish, monkeypatch):
    """Also where what was moved is not taken apart: it holds the lock file that was opened."""
    _unused(store, publish)
    lock = lease._lock

    def late(descriptor: int, *, alone: bool) -> bool:
        monkeypatch.setattr(lease, "_lock", lock)
        with monkeypatch.context() as kept:
            kept.setattr(Root, "remove_tree", lambda *_: None)
            assert len(store.clear().removed) == 1
        return lock(descriptor, alone=alone)

    monkeypatch.setattr(lease, "_lock", late)
    publish.hit(store)
    assert len(store.clear().in_use) == 1


def test_a_folder_of_keys_that_is_removed_before_each_write_is_made_again(store, publish, monkeypatch):
    make_folders = Root.make_folders
    left = iter(range(15))

    def removed(root: Root, name: str) -> None:
        make_folders(root, name)
        if name == entry.KEYS and next(left, None) is not None:
            root.rmdir(name)

    monkeypatch.setattr(Root, "make_folders", removed)
    assert isinstance(publish(store), Hit)
    assert next(left, None) is None


def test_an_entry_that_is_published_again_while_it_is_cleared_stays(store, publish, monkeypatch):
    from veomni_hook.cache import clearing

    published = publish(store)
    assert isinstance(published, Hit)
    lease.release(store.root)
    # Gone when it is asked for as a folder, there when it is asked for at all.
    monkeypatch.setattr(clearing, "is_kind", lambda _root, _name, kind: kind is bool)
    cleared = store.clear()
    assert not cleared.failed and os.path.exists(published.path)
