"""An entry is in use from the hit on, in every process that inherits it, until the last of them ends."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from tests.processes import until
from veomni_hook.cache import lease
from veomni_hook.cache.store import Hit
from veomni_hook.cache.trusted_folder import Root, Vanished

from .conftest import KEY, MODULE

ENTRY = "pkg-1/h"


@pytest.fixture
def opened(root):
    opened = Root.create(str(root))
    opened.make_folders(ENTRY)
    return opened


def _claimable(root):
    try:
        descriptor = lease.claim(root, ENTRY)
    except lease.InUse:
        return False
    assert descriptor is not None
    os.close(descriptor)
    return True


def test_shared_entry_cannot_be_claimed_until_released(opened):
    assert _claimable(opened)
    lease.keep(lease.share(opened, ENTRY, create=True), opened.path)
    lease.keep(lease.share(opened, ENTRY), opened.path)
    assert not _claimable(opened)
    lease.release(os.path.join(opened.path, "other"))
    assert not _claimable(opened)
    lease.release(opened.path)
    assert _claimable(opened)


def test_one_descriptor_an_entry_is_kept(opened):
    lease.keep(lease.share(opened, ENTRY, create=True), opened.path)
    free = os.dup(0)
    os.close(free)
    for _ in range(5):
        lease.keep(lease.share(opened, ENTRY), opened.path)
    again = os.dup(0)
    os.close(again)
    assert again == free


def test_descriptor_does_not_reach_executed_programs(opened):
    with pytest.raises(Vanished, match="is missing"):  # without a lock file
        lease.share(opened, ENTRY)
    descriptor = lease.share(opened, ENTRY, create=True)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_entry_that_is_being_removed_is_not_shared(opened):
    claimed = lease.claim(opened, ENTRY)
    assert claimed is not None
    with pytest.raises(Vanished, match="just being removed"):
        lease.share(opened, ENTRY)
    os.close(claimed)


def test_entry_removed_between_opening_and_locking_is_not_shared(opened, monkeypatch):
    os.close(lease.share(opened, ENTRY, create=True))
    lock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        opened.unlink(f"{ENTRY}/{lease.LOCK_NAME}")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(Vanished, match="was just removed"):
        lease.share(opened, ENTRY)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_gives_hits_and_nothing_to_clear(store, publish, monkeypatch, number):
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    publish.hit(store)
    assert isinstance(store.lookup(KEY, MODULE), Hit)
    cleared = store.clear()
    assert cleared.removed == ()
    assert "no locks" in cleared.in_use[0].reason
    assert isinstance(store.lookup(KEY, MODULE), Hit)
    assert len(store.clear(force=True).removed) == 1


def test_system_without_flock_works(store, publish, monkeypatch):
    monkeypatch.setattr(lease, "fcntl", None)
    publish.hit(store)
    assert isinstance(store.lookup(KEY, MODULE), Hit)
    lease.release(store.root)
    assert len(store.clear().removed) == 1


def test_entry_stays_in_use_while_a_forked_child_lives(store, root, publish, in_child):
    held, let_go = os.pipe()

    def leave_an_orphan() -> int:
        publish.hit(store)
        orphan = os.fork()
        if orphan == 0:
            os.close(let_go)
            os.read(held, 1)  # returns when the test closes its end
            os._exit(0)
        return orphan

    in_child(leave_an_orphan)
    assert len(store.clear().in_use) == 1
    os.close(let_go)
    os.close(held)
    until(lambda: not store.clear().in_use)
    assert not (root / "pkg-1.2.3").exists()
