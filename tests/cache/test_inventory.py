"""What `info` and `verify` say about a cache; neither changes it."""

import json
import os
from pathlib import Path

import pytest

from veomni_hook.cache import entry, key
from veomni_hook.cache import store as store_module
from veomni_hook.cache.inventory import TRASH_PREFIX
from veomni_hook.cache.store import Store
from veomni_hook.errors import CacheError

from .conftest import KEY, MODULE, inputs_of

FILE = "pkg-1.2.3/c0ffee/models/one/modeling_one.py"
OTHER = "cd" * 20


def _snapshot(root):
    return {path: (path.stat().st_ino, path.stat().st_mtime) for path in root.rglob("*")}


def test_info_counts_what_is_there(store, root, publish):
    publish.hit(store)
    publish.hit(store, key=OTHER, patch_hash="other", module="pkg.two")
    store.publish_unpatched("ef" * 20, "pkg.three")
    (root / "keys" / ("12" * 20)).write_bytes(b"nonsense")
    before = _snapshot(root)
    info = store.info()
    assert (info.root, info.mode, info.exists, info.writable) == (str(root), "disk", True, True)
    assert (info.unpatched, info.damaged) == (1, 1)
    assert [item.module for item in info.entries] == [MODULE, "pkg.two"]
    first = info.entries[0]
    bytecode = entry.bytecode_name(FILE, key.interpreter_tag())
    assert first.path == str(root / FILE)
    assert first.size == (root / FILE).stat().st_size + (root / bytecode).stat().st_size
    assert (first.key, first.interpreter, first.patch_hash) == (KEY, key.interpreter_tag(), "c0ffee")
    assert info.size == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert _snapshot(root) == before


def test_results_are_json(store, publish):
    publish.hit(store)
    for result in (store.info(), store.verify(), store.clear()):
        assert json.loads(json.dumps(result.to_dict()))["root"] == store.root
    assert store.info().to_dict()["entries"][0]["module"] == MODULE
    assert store.clear().to_dict()["in_use"][0]["reason"] == "a running process uses it"


def test_missing_folder_is_an_empty_cache(store, root):
    assert not store.info().exists
    assert store.verify().ok
    assert store.clear().removed == ()
    assert not root.exists()


def test_store_without_a_folder_says_why():
    store = Store("", mode="memory", reason="no disk")
    assert (store.info().mode, store.info().reason, store.info().exists) == ("memory", "no disk", False)
    assert store.verify().checked == 0
    assert store.clear().manifests == 0


@pytest.mark.parametrize("command", ["info", "verify", "clear"])
def test_folder_that_is_not_trusted_is_an_error_with_a_remedy(store, root, publish, command):
    publish.hit(store)
    root.chmod(0o777)
    with pytest.raises(CacheError) as caught:
        getattr(store, command)()
    assert "can be written by other users" in caught.value.what
    assert caught.value.where == str(root)
    assert "chmod 700" in caught.value.fix
    assert (root / FILE).exists()


def test_verify_finds_nothing_wrong_with_a_fresh_cache(store, root, publish):
    publish.hit(store)
    store.publish_unpatched(OTHER, "pkg.three")
    before = _snapshot(root)
    found = store.verify()
    assert (found.checked, found.defects, found.stale, found.leftovers) == (2, (), (), ())
    assert found.ok
    assert _snapshot(root) == before


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        (FILE, lambda path: path.write_bytes(b"")),
        (FILE, lambda path: path.chmod(0o666)),
        (entry.bytecode_name(FILE, key.interpreter_tag()), lambda path: path.write_bytes(b"")),
        (f"keys/{KEY}", lambda path: path.write_bytes(b"")),
        (str(Path(FILE).parent), lambda path: path.chmod(0o777)),
    ],
)
def test_verify_names_each_defect(store, root, publish, name, spoil):
    publish.hit(store)
    spoil(root / name)
    found = store.verify()
    assert not found.ok
    assert [str(root / name) in defect.reason for defect in found.defects] == [True]


def test_verify_tells_stale_from_defective(store, publish, tmp_path):
    config = tmp_path / "config.py"
    inputs = inputs_of(config, "x = 1")
    publish.hit(store, inputs=inputs)
    publish.unpatched(store, "pkg.three", inputs, OTHER)
    config.write_text("x = 2")
    found = store.verify()
    assert found.ok
    assert len(found.stale) == 2
    assert len(store.info().entries) + store.info().unpatched == 1  # OWN's; the others repeat it
    assert all("config.py, which a config was read from, has changed" in item.reason for item in found.stale)


def test_verify_checks_other_interpreters_entries_by_their_seals(store, root, publish, monkeypatch):
    monkeypatch.setattr(store_module, "interpreter_tag", lambda: "cpython-399")
    publish.hit(store)
    bytecode = root / entry.bytecode_name(FILE, "cpython-399")
    data = bytecode.read_bytes()
    # Another interpreter's magic and marshal format are none of this one's business.
    bytecode.write_bytes(data[:8] + b"\0\0\r\n" + data[12:])
    assert store.verify().ok
    bytecode.write_bytes(data[:-1] + b"~")
    assert "was changed after it was written" in store.verify().defects[0].reason


def test_verify_lists_leftovers(store, root, publish):
    publish.hit(store)
    (root / "keys" / KEY).unlink()
    (root / "keys" / ".123.tmp").write_bytes(b"")
    (root / f"{TRASH_PREFIX}1").mkdir()
    (root / "unrelated" / "folder").mkdir(parents=True)
    names = [os.path.relpath(path, root) for path in store.verify().leftovers]
    assert names == ["pkg-1.2.3/c0ffee", "keys/.123.tmp", f"{TRASH_PREFIX}1"]
