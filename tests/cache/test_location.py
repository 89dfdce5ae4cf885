"""Which folder serves, which is refused and why, and the temporary folder's life."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.processes import outputs, started, until
from veomni_hook.cache import location
from veomni_hook.cache.store import Hit, Miss, NotStored, Store, open_store

from .conftest import KEY, MODULE, NOBODY


@pytest.fixture(autouse=True)
def temporary_folders(tmp_path, monkeypatch):
    """Where temporary folders are made in this test; they are removed with it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _refused(cache_dir, temporary_folders):
    store = open_store(str(cache_dir))
    assert store.mode == "temporary"
    assert Path(store.root).parent == temporary_folders
    assert os.stat(store.root).st_mode & 0o7777 == 0o700
    return store.reason


def test_folder_asked_for_is_made_private(root):
    store = open_store(str(root / "deep"))
    assert (store.root, store.mode, store.reason) == (str(root / "deep"), "disk", "")
    assert root.stat().st_mode & 0o7777 == (root / "deep").stat().st_mode & 0o7777 == 0o700


def test_default_is_the_users_cache_folder(tmp_path, monkeypatch):
    import platformdirs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = platformdirs.user_cache_dir("veomni-hook", appauthor=False)
    assert open_store(None).root == os.path.realpath(expected)
    assert "veomni-hook" in expected


def test_home_relative_names_and_own_links_are_resolved(root, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    root.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(root)
    asked = {"~/one": tmp_path / "one", "two": tmp_path / "two", "link": root, "link/sub": root / "sub"}
    assert {name: open_store(name).root for name in asked} == {name: str(at) for name, at in asked.items()}


def test_user_without_a_home_gets_no_folder_named_tilde(tmp_path, temporary_folders, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert "no home folder" in _refused(Path("~/one"), temporary_folders)
    assert not (tmp_path / "~").exists()


def _served(cache_dir, publish):
    """How a store serves, why, and where it stores; its temporary folder is removed."""
    store = open_store(cache_dir)
    found = [store.mode, store.reason, publish.hit(store).path]
    location._remove_temporary(store.root, os.getpid())
    return found


def _as_container_user(work, in_child, **variables):
    """Work as a user whom no passwd entry names, without HOME except where it is given."""

    def alone() -> Any:
        for name in ("HOME", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        os.environ.update(variables)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(54321)
            os.setuid(54321)
        else:
            import pwd

            def unknown(user: int) -> None:
                raise KeyError(user)

            pwd.getpwuid = unknown
        return work()

    return in_child(alone)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, "this user has no home folder, and VEOMNI_CACHE_DIR names no other"),
        ({"HOME": ""}, "this user has no home folder"),
        ({"HOME": "/nonexistent/home"}, "/nonexistent"),
        ({"HOME": "/proc"}, "/proc/.cache"),
        ({"XDG_CACHE_HOME": "/proc"}, "/proc/veomni-hook"),
    ],
)
def test_user_without_a_passwd_entry_gets_a_temporary_folder(
    open_folder, publish, in_child, monkeypatch, variables, reason
):
    import platformdirs

    assert platformdirs  # loaded before the child gives up its rights
    open_folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))

    mode, why, path = _as_container_user(lambda: _served(None, publish), in_child, **variables)
    assert mode == "temporary"
    assert reason in why
    assert path.startswith(str(open_folder / "veomni-hook-"))


def test_relative_variable_for_caches_is_no_error(in_child, open_folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    open_folder.chmod(0o1777)

    def work() -> str:
        os.chdir(open_folder)
        return open_store(None).mode

    # Some releases of platformdirs take it as it is, others find no home then.
    assert _as_container_user(work, in_child, XDG_CACHE_HOME="relative") in ("temporary", "disk")


@pytest.mark.parametrize("through_default", [False, True])
def test_relative_folder_without_a_working_directory(tmp_path, in_child, through_default, temporary_folders):
    import platformdirs

    def work() -> list[str]:
        gone = tmp_path / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        if through_default:
            platformdirs.user_cache_dir = lambda *_, **__: "relative"
        store = open_store(None if through_default else "relative")
        found = [store.mode, store.reason]
        location._remove_temporary(store.root, os.getpid())
        return found

    assert in_child(work) == [
        "temporary",
        "relative is relative, and there is no working directory: No such file or directory",
    ]


def test_the_null_device_asks_for_no_cache_on_the_disk(publish, temporary_folders):
    store = open_store(os.devnull)
    assert (store.mode, store.root, store.reason) == ("memory", "", "")
    assert isinstance(publish(store), NotStored)
    store.publish_unpatched(KEY, MODULE)
    assert isinstance(store.lookup(KEY, MODULE), Miss)
    assert store.info().mode == "memory"
    assert os.listdir(temporary_folders) == []


@pytest.mark.parametrize("sub", ["", "sub"])
def test_link_of_another_user_is_refused(root, tmp_path, temporary_folders, give_away, sub):
    root.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(root)
    give_away(tmp_path / "link")
    reason = _refused(tmp_path / "link" / sub, temporary_folders)
    assert "belongs to user" in reason
    assert "link" in reason
    assert not (root / "sub").exists()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_folder_that_others_can_write_is_refused(root, temporary_folders, mode):
    root.mkdir()
    root.chmod(mode)
    assert f"can be written by other users (mode {mode:04o})" in _refused(root, temporary_folders)


def test_folder_of_another_user_and_a_file_in_its_place_are_refused(
    root, tmp_path, temporary_folders, give_away
):
    (tmp_path / "file").write_bytes(b"precious")
    for place in (tmp_path / "file", tmp_path / "file" / "sub"):
        assert str(tmp_path / "file") in _refused(place, temporary_folders)
    assert (tmp_path / "file").read_bytes() == b"precious"
    root.mkdir(mode=0o700)
    give_away(root)
    assert "belongs to user" in _refused(root, temporary_folders)


@pytest.mark.parametrize(("mode", "accepted"), [(0o777, False), (0o1777, True), (0o770, True), (0o755, True)])
@pytest.mark.parametrize("through_link", [False, True])
def test_folder_above_must_not_let_everyone_swap_the_cache(root, tmp_path, mode, accepted, through_link):
    root.mkdir()
    root.chmod(mode)
    (tmp_path / "link").symlink_to(root)
    store = open_store(str((tmp_path / "link" if through_link else root) / "cache"))
    assert (store.mode == "disk") == accepted
    assert accepted or "no sticky bit" in store.reason


def test_system_without_user_ids_takes_any_folder(root, monkeypatch):
    root.mkdir()
    root.chmod(0o777)
    monkeypatch.delattr(os, "geteuid")
    assert open_store(str(root / "cache")).mode == "disk"


def test_folder_that_cannot_be_made_gives_a_temporary_one(open_folder, publish, in_child, monkeypatch):
    import platformdirs

    assert platformdirs  # loaded before the child gives up its rights
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    (open_folder / "closed").mkdir(mode=0o500)
    if os.geteuid() == 0:
        os.chown(open_folder / "closed", NOBODY, NOBODY)

    cache = str(open_folder / "closed/cache")
    mode, reason, path = in_child(lambda: _served(cache, publish), user=NOBODY)
    assert mode == "temporary"
    assert "closed" in reason
    assert "Permission denied" in reason
    assert path.startswith(str(open_folder / "veomni-hook-"))
    assert os.listdir(open_folder) == ["closed"]


def test_existing_folder_that_cannot_be_written_is_still_read(open_folder, publish, in_child, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))

    def work() -> list[Any]:
        cache = str(open_folder / "cache")
        publish.hit(open_store(cache))
        folders = [cache, *(str(path) for path in Path(cache).rglob("*") if path.is_dir())]
        for folder in folders:
            os.chmod(folder, 0o500)
        store = open_store(cache)
        assert store.reason == f"{cache} cannot be written"
        found = store.lookup(KEY, MODULE)
        assert isinstance(found, Hit), found
        other = publish.hit(store, key="cd" * 20, patch_hash="other")
        for folder in folders:
            os.chmod(folder, 0o700)
        return [store.mode, store.reason, found.path, other.path]

    mode, reason, path, other = in_child(work, user=NOBODY)
    assert mode == "disk"
    assert "Permission denied" in reason
    assert path.startswith(str(open_folder / "cache/pkg-1.2.3"))
    assert other.startswith(str(open_folder / "veomni-hook-"))


def test_without_any_folder_the_store_holds_nothing(root, publish, monkeypatch):
    def fail(**options: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    root.write_bytes(b"")
    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    store = open_store(str(root))
    assert (store.mode, store.root) == ("memory", "")
    assert str(root) in store.reason
    assert "no temporary folder can be made: No usable" in store.reason
    assert isinstance(publish(store), NotStored)


SCRIPT = """
import os, sys, time
from veomni_hook.cache.store import Hit, Store, open_store
store = open_store(sys.argv[1])
hit = store.publish(
    "ab", module="pkg.mod", distribution="pkg", version="1", patch_hash="h", text="x = 1\\n",
    report={},
)
assert isinstance(hit, Hit) and os.path.exists(hit.path)
print(store.mode, store.root, flush=True)
"""
#: What the process does then, and whether the folder is there when it has ended.
ENDS = {
    "at once": ("", False),
    "after a forked child": (
        "child = os.fork()\nif child == 0: sys.exit(0)\nos.waitpid(child, 0)\n"
        "assert os.path.exists(hit.path), 'removed by the child'\n",
        False,
    ),
    "before a forked child": (
        """if os.fork() == 0:
    os.close(0); os.close(1); os.close(2)
    parent = os.getppid()
    while os.getppid() == parent: time.sleep(0.01)
    open("seen.part", "w").write(str(os.path.exists(hit.path)))
    os.rename("seen.part", "seen")
    os._exit(0)
""",
        True,
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_temporary_folder_of_a_refused_cache_lives_as_long_as_its_processes(
    root, tmp_path, temporary_folders, how
):
    then, stays = ENDS[how]
    root.mkdir()
    root.chmod(0o777)
    process = started("-c", SCRIPT + then, root, cwd=tmp_path, TMPDIR=str(temporary_folders))
    out, errors = outputs(process)
    mode, _, folder = out.splitlines()[0].partition(" ")
    assert (errors, mode, Path(folder).parent) == ("", "temporary", temporary_folders)
    assert (Path(folder) / "pkg-1/h/mod.py").exists() == Path(folder).exists() == stays
    if stays:
        until((tmp_path / "seen").exists)
        assert (tmp_path / "seen").read_text() == "True"


def test_only_the_making_process_removes_the_temporary_folder(publish):
    path, problem = location.make_temporary()
    assert problem == ""
    publish.hit(Store(path))
    location._remove_temporary(path, os.getpid() + 1)
    assert os.path.exists(path)
    location._remove_temporary(path, os.getpid())
    assert not os.path.exists(path)
