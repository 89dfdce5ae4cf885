"""Lookup and publication: every defect is a miss with its reason, and the next publication heals it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT
from veomni_hook.cache import entry, key
from veomni_hook.cache import store as store_module
from veomni_hook.cache.store import Hit, Miss, NotStored, Store, Unpatched

from .conftest import KEY, MODULE, NOBODY, TEXT, go_on, inputs_of, waiting

ENTRY = "pkg-1.2.3/c0ffee"
FILE = f"{ENTRY}/models/one/modeling_one.py"
BYTECODE = entry.bytecode_name(FILE, key.interpreter_tag())
MANIFEST = f"keys/{KEY}"


def _answer(code):
    names: dict[str, Any] = {}
    exec(code, names)
    return names["answer"]()


def _miss(store, module=MODULE):
    found = store.lookup(KEY, module)
    assert isinstance(found, Miss), found
    return found.reason


def _hit(store):
    found = store.lookup(KEY, MODULE)
    assert isinstance(found, Hit), found
    return found


def test_hit_gives_back_what_was_published(store, root, publish):
    published = publish.hit(store)
    for hit in (published, _hit(store), _hit(Store(root))):
        assert hit.path == str(root / FILE) == hit.code.co_filename
        assert (root / FILE).read_bytes() == TEXT.encode()
        assert hit.source() == TEXT
        assert _answer(hit.code) == "größer"
        assert hit.report == {"applied": [{"target": "answer"}]}
        assert (hit.manifest.module, hit.manifest.distribution) == (MODULE, "pkg")
        assert (hit.manifest.version, hit.manifest.patch_hash) == ("1.2.3", "c0ffee")


def test_text_is_kept_byte_for_byte(store, publish):
    text = "def answer():\r\n\treturn '''a\r\nb'''\x0c\r\n# no newline at the end"
    publish.hit(store, text=text)
    assert _hit(store).source() == text
    assert Path(_hit(store).path).read_bytes() == text.encode()


def test_other_keys_and_modules_are_misses_and_a_lookup_writes_nothing(store, root, publish):
    assert "cache is missing" in _miss(store) and not root.exists()
    publish.hit(store, key="cd" * 20)
    assert f"{KEY} is missing" in _miss(store)
    publish.hit(store)
    assert "stored for pkg.models.one.modeling_one, not for pkg.other" in _miss(store, "pkg.other")


@pytest.mark.parametrize("stage1", ["", "../etc", "a/b", ".hidden"])
def test_key_that_leads_elsewhere_is_a_miss_and_not_stored(store, root, publish, stage1):
    assert isinstance(store.lookup(stage1, MODULE), Miss)
    assert isinstance(publish(store, key=stage1), NotStored)
    store.publish_unpatched(stage1, MODULE)
    assert not root.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"module": "pkg..mod"}, {"module": "pkg.../../mod"}, {"version": "../../x"}, {"distribution": "/etc"},
        {"patch_hash": ""},
    ],
)  # fmt: skip
def test_odd_names_are_not_stored(store, root, publish, changes):
    answer = publish(store, **changes)
    assert isinstance(answer, NotStored)
    assert "cannot be part of a path" in answer.reason
    assert not root.exists()


def test_text_that_is_no_utf8_is_not_stored(store, publish):
    answer = publish(store, text="x = '\udc80'")
    assert isinstance(answer, NotStored) and "UTF-8" in answer.reason


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"text": "x = '\0'"}, "null bytes"),
        ({"text": "def"}, "invalid syntax"),
    ],
)
def test_an_error_of_the_code_is_passed_on_and_leaves_no_manifest(store, root, publish, changes, error):
    with pytest.raises((ValueError, SyntaxError), match=error):
        publish(store, **changes)
    assert not (root / MANIFEST).exists()


def test_a_lease_of_another_user_is_a_miss(store, root, publish, give_away):
    publish.hit(store)
    give_away(root / ENTRY / ".lease")
    assert "belongs to user" in _miss(store)


FOLDERS = [
    "", "keys", "pkg-1.2.3", ENTRY, f"{ENTRY}/models", f"{ENTRY}/models/one", str(Path(BYTECODE).parent),
]  # fmt: skip


def _swap_for_link(folder):
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")


def _swap_for_file(folder):
    shutil.rmtree(folder)
    folder.write_bytes(b"")


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize(
    "spoil", [lambda path: path.chmod(0o770), lambda path: path.chmod(0o707), _swap_for_link, _swap_for_file]
)
def test_bad_folder_is_a_miss_and_nothing_is_stored_in_it(store, root, publish, name, spoil):
    publish.hit(store)
    spoil(root / name)
    before = sorted(root.parent.rglob("*"))
    reason = _miss(store)
    assert str(root / name) in reason
    answer = publish(store)
    assert isinstance(answer, NotStored), answer
    assert answer.reason == store.reason
    assert set(sorted(root.parent.rglob("*"))) - set(before) <= {root / f"{ENTRY}/.lease"}


def test_error_that_nobody_thought_of_is_a_miss(store, publish, monkeypatch):
    publish.hit(store)
    monkeypatch.setattr(entry, "load", lambda *_: 1 / 0)
    assert _miss(store) == "ZeroDivisionError: division by zero"


def test_only_dates_changed_is_a_hit(store, root, publish, tmp_path):
    config = tmp_path / "config.py"
    publish.hit(store, inputs=inputs_of(config, "x = 1"))
    for path in [config, *root.rglob("*")]:
        os.utime(path, (12345, 12345))
    assert _answer(_hit(store).code) == "größer"


def test_changed_or_missing_config_is_a_miss(store, publish, tmp_path):
    config = tmp_path / "config.py"
    publish.hit(store, inputs=inputs_of(config, "x = 1"))
    config.write_text("x = 2")
    assert f"{config}, which a config was read from, has changed" in _miss(store)
    config.unlink()
    assert f"{config}, which a config was read from, is gone" in _miss(store)
    config.write_text("x = 1")
    assert isinstance(store.lookup(KEY, MODULE), Hit)


def test_unpatched_modules_are_remembered_until_a_config_changes(store, publish, root, tmp_path):
    config = tmp_path / "config.py"
    publish.unpatched(store, MODULE, inputs_of(config, "x = 1"))
    found = store.lookup(KEY, MODULE)
    assert isinstance(found, Unpatched)
    assert found.manifest.module == MODULE
    assert os.listdir(root) == ["keys"]
    config.write_text("x = 2")
    assert "has changed" in _miss(store)


def test_unpatched_module_that_cannot_be_remembered_keeps_the_reason(store, root):
    root.write_bytes(b"")
    store.publish_unpatched(KEY, MODULE)
    assert str(root) in store.reason


def test_other_interpreter_is_a_miss(store, publish, monkeypatch):
    publish.hit(store)
    monkeypatch.setattr(store_module, "interpreter_tag", lambda: "cpython-399")
    assert "not by cpython-399" in _miss(store)


def test_two_interpreters_share_one_text(store, root, publish, monkeypatch):
    publish.hit(store)
    number = (root / FILE).stat().st_ino
    monkeypatch.setattr(store_module, "interpreter_tag", lambda: "cpython-399")
    publish.hit(store, key="cd" * 20)
    monkeypatch.undo()
    assert (root / FILE).stat().st_ino == number
    assert len(os.listdir((root / BYTECODE).parent)) == 2
    assert isinstance(store.lookup(KEY, MODULE), Hit)


def test_moved_cache_is_a_miss_that_republishes(root, publish):
    publish.hit(Store(root))
    moved = root.with_name("moved")
    root.rename(moved)
    store = Store(moved)
    assert f"was compiled as {root / FILE}: the cache was moved" in _miss(store)
    assert publish.hit(store).path == str(moved / FILE)
    assert _hit(store).code.co_filename == str(moved / FILE)


def test_equal_text_is_not_replaced_under_a_running_process(store, publish):
    number = os.stat(publish.hit(store).path).st_ino
    assert os.stat(publish.hit(store, key="cd" * 20).path).st_ino == number


def test_other_text_under_the_same_hash_makes_the_first_key_a_miss(store, publish):
    publish.hit(store)
    publish.hit(store, key="cd" * 20, text="def answer():\n    return 2\n")
    assert "was changed after it was written" in _miss(store)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_failing_write_is_not_stored_with_its_reason(store, root, publish, monkeypatch, number):
    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", fail)
    answer = publish(store)
    assert isinstance(answer, NotStored)
    assert os.strerror(number) in answer.reason
    assert store.reason == answer.reason
    monkeypatch.undo()
    assert not [path for path in root.rglob("*") if path.is_file() and path.name != ".lease"]
    assert isinstance(store.lookup(KEY, MODULE), Miss)
    publish.hit(store)
    _hit(store)


@pytest.mark.parametrize("survivors", range(1, 3))
def test_writer_that_fails_halfway_leaves_a_miss(store, publish, monkeypatch, survivors):
    replace, calls = os.replace, []

    def fail(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) > survivors:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*arguments, **options)

    monkeypatch.setattr(os, "replace", fail)
    assert isinstance(publish(store), NotStored)
    monkeypatch.undo()
    assert isinstance(store.lookup(KEY, MODULE), Miss)


def test_read_only_cache_still_gives_hits(open_folder, publish, in_child):
    store = Store(open_folder / "cache")

    def work() -> list[str]:
        publish.hit(store)
        for path in [store.root, *(str(path) for path in Path(store.root).rglob("*"))]:
            os.chmod(path, 0o500 if os.path.isdir(path) else 0o400)
        answer = publish(store, key="cd" * 20)
        found = [_hit(store).path, answer.reason if isinstance(answer, NotStored) else repr(answer)]
        for folder in [store.root, *(path for path in Path(store.root).rglob("*") if path.is_dir())]:
            os.chmod(folder, 0o700)
        return found

    path, reason = in_child(work, user=NOBODY)
    assert path == str(open_folder / "cache" / FILE)
    assert "Permission denied" in reason


def test_unreadable_cache_is_a_miss(open_folder, publish, in_child):
    store = Store(open_folder / "cache")

    def work() -> list[str]:
        reasons = []
        publish.hit(store)
        for name in (FILE, BYTECODE, MANIFEST, "keys", ENTRY, ""):
            path = os.path.join(store.root, name)
            mode = os.stat(path).st_mode
            os.chmod(path, 0)
            reasons.append(_miss(store))
            os.chmod(path, mode & 0o777)
        assert isinstance(store.lookup(KEY, MODULE), Hit)
        return reasons

    reasons = in_child(work, user=NOBODY)
    assert len(reasons) == 6
    assert all("Permission denied" in reason for reason in reasons), reasons


def test_store_without_a_folder_holds_nothing(publish):
    store = Store("", mode="memory", reason="no disk")
    assert _miss(store) == "no disk"
    answer = publish(store)
    assert isinstance(answer, NotStored)
    assert answer.reason == "no disk"
    store.publish_unpatched(KEY, MODULE)
    assert _miss(store) == "no disk"


def test_substitute_serves_when_the_folder_cannot_be_written(root, tmp_path, publish):
    asked: list[str] = []

    def substitute(reason: str) -> Store:
        asked.append(reason)
        return Store(tmp_path / "substitute", mode="temporary", reason=reason)

    root.write_bytes(b"")
    store = Store(root, substitute=substitute)
    assert publish.hit(store).path == str(tmp_path / "substitute" / FILE)
    assert _hit(store).path == str(tmp_path / "substitute" / FILE)
    publish.hit(store, key="cd" * 20)
    assert len(asked) == 1
    assert str(root) in asked[0]
    root.unlink()
    assert publish.hit(store).path == str(root / FILE)
    assert _hit(store).path == str(root / FILE)


WRITER = """
import sys
from veomni_hook.cache.store import Hit, Store
root, key, module, text = sys.argv[1:5]
store = Store(root)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(30):
    hit = store.publish(
        key, module=module, distribution="pkg", version="1.2.3", patch_hash="c0ffee", text=text,
        report={},
    )
    assert isinstance(hit, Hit), hit
    found = store.lookup(key, module)
    assert isinstance(found, Hit), found
    assert found.source() == text
"""


def test_writers_in_processes_never_show_half_an_entry(store, root, publish):
    writers = [waiting(WRITER, str(root), KEY, MODULE, TEXT) for _ in range(3)]
    publish.hit(store)
    for _ in go_on(*writers):
        _hit(store)
    assert not [path for path in root.rglob("*") if path.name.endswith(".tmp")]


def test_writers_in_threads_never_show_half_an_entry(store, publish):
    start = threading.Barrier(6)
    answers: list[object] = []

    def work() -> None:
        start.wait()
        for _ in range(10):
            answers.append(publish(store))
            answers.append(store.lookup(KEY, MODULE))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 120
    assert [answer for answer in answers if not isinstance(answer, Hit)] == []


def test_store_is_light_to_import():
    heavy = {
        "json", "hashlib", "dataclasses", "pathlib", "tempfile", "platformdirs", "typing", "inspect", "re",
    }  # fmt: skip
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); before = set(sys.modules); import veomni_hook.cache.store;"
        f"print(sorted({heavy!r} & (set(sys.modules) - before)), 'entry' in str(sys.modules))"
    )
    command = [sys.executable, "-I", "-S", "-c", script]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "[] True\n"


_FIELDS = dict.fromkeys(("key", "distribution", "version", "patch_hash", "tag", "text_seal"), "")
_MANIFEST = entry.Manifest({**_FIELDS, "module": "pkg.mod"}, {}, b'{"applied": []}')


def _a_hit():
    code = compile("", "/somewhere/mod.py", "exec")
    return Hit(_MANIFEST, "/somewhere/mod.py", code, "größe\r\n".encode())


def test_report_is_parsed_anew_each_time():
    hit = _a_hit()
    hit.report["applied"].append("mine")
    assert hit.report == {"applied": []}


def test_source_is_decoded_and_not_normalised():
    assert _a_hit().source() == "größe\r\n"


def test_answers_print_what_they_say():
    assert repr(_a_hit()) == "Hit('pkg.mod', '/somewhere/mod.py')"
    assert repr(Unpatched(_MANIFEST)) == "Unpatched('pkg.mod')"
    assert (repr(Miss("why")), repr(NotStored("why"))) == ("Miss('why')", "NotStored('why')")
    assert not isinstance(Miss("why"), NotStored)
