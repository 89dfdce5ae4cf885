"""Every tampering that docs/data/tamperings.json lists is a miss with a reason, and never code that runs."""

from __future__ import annotations

import os

import pytest

from scripts import tables
from tests.cache.tampering import FORGERIES, OF_ANOTHER_USER, TAMPERINGS, Stored
from veomni_hook.cache.store import Hit, Miss, NotStored

from .conftest import KEY, MODULE

#: What the reason says, by what was done; and where the next publication cannot put it right.
REASONS = {
    "emptied": "truncated|was changed", "cut": "truncated|was changed", "extended": "truncated|was changed",
    "edited": "was edited|was changed", "removed": "is missing", "linked": "is a symbolic link", "piped": "is a named pipe",
    "foldered": "is a folder, not", "writable": "can be written by other users", "magic": "bad magic",
    "interpreter": "not for cpython", "build": "another build", "text": "another text", "garbage": "read by marshal",
    "code": "no code object but a int", "moved": "compiled as", "key": "another key", "user": "belongs to user",
}  # fmt: skip
#: Folders in whose place nothing is stored.
REFUSED = {"cache-writable", "cache-linked", "cache-of-another-user"} | {
    "folder-writable",
    "folder-linked",
    "folder-of-another-user",
}


@pytest.mark.parametrize("name", [*TAMPERINGS, *OF_ANOTHER_USER])
def test_it_is_noticed_and_healed(store, root, publish, name):
    if name in OF_ANOTHER_USER and os.geteuid() != 0:
        pytest.skip("only the superuser can give files away")
    stored = Stored.of(root, publish.hit(store).path, KEY)
    assert isinstance(store.lookup(KEY, MODULE), Hit)
    {**TAMPERINGS, **OF_ANOTHER_USER}[name](stored)
    found = store.lookup(KEY, MODULE)
    assert isinstance(found, Miss)
    assert any(part in found.reason for part in REASONS[name.rpartition("-")[2]].split("|")), found.reason
    assert str(stored.files.get(name.partition("-")[0], root)) in found.reason
    if name in REFUSED or name.endswith("foldered"):
        assert isinstance(publish(store), NotStored)
    else:
        assert publish.hit(store) and isinstance(store.lookup(KEY, MODULE), Hit)


def test_a_forger_is_not_noticed(store, root, publish):
    """The document says so; if this fails one day, the document is to be corrected."""
    stored = Stored.of(root, publish.hit(store).path, KEY)
    FORGERIES["bytecode-forged"](stored)
    found = store.lookup(KEY, MODULE)
    assert isinstance(found, Hit)
    names: dict[str, object] = {}
    exec(found.code, names)
    assert names["FORGED"] is True


def test_the_table_lists_them_all() -> None:
    rows = tables.read("tamperings")
    listed = [row["tampering"] for row in rows]
    assert {row["tampering"] for row in rows if row["noticed"] == "no"} == {*FORGERIES}
    assert listed == list(dict.fromkeys(listed))
    inputs = {
        "config-changed",
        "config-removed",
    }  # of the files that configs were read from, not of the cache
    assert {*listed} == {*TAMPERINGS, *OF_ANOTHER_USER, *inputs, *FORGERIES}
