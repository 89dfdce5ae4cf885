"""What another user could have written is refused, and files are replaced in one step."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from veomni_hook import ownership
from veomni_hook.cache import trusted_folder
from veomni_hook.cache.trusted_folder import Defect, Root, Vanished


@pytest.fixture
def opened(root):
    opened = Root.create(str(root))
    opened.make_folders("a/b")
    opened.write("a/b/file", b"content")
    return opened


def _mode(path):
    return path.stat().st_mode & 0o7777


def test_everything_made_is_private_whatever_the_umask(tmp_path, in_child):
    def work() -> list[int]:
        os.umask(0)
        with Root.create(str(tmp_path / "above/cache")) as root:
            root.make_folders("a/b")
            root.write("a/b/file", b"")
            os.close(root.open_file("a/lock", create=True))
        names = ("above", "above/cache", "above/cache/a", "above/cache/a/b")
        files = ("above/cache/a/b/file", "above/cache/a/lock")
        return [_mode(tmp_path / name) for name in (*names, *files)]

    assert in_child(work) == [0o700] * 4 + [0o600] * 2


def test_read_gives_back_what_was_written_and_leaves_nothing_aside(opened, root):
    data = os.urandom(300_000)
    opened.write("a/b/file", data)
    assert opened.read("a/b/file") == data
    assert os.listdir(root / "a/b") == ["file"]


def test_short_reads_and_writes_are_continued(opened, monkeypatch):
    read, write = os.read, os.write
    monkeypatch.setattr(os, "read", lambda descriptor, size: read(descriptor, min(size, 3)))
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    opened.write("a/b/file", b"another content")
    assert opened.read("a/b/file") == b"another content"


def test_failed_write_keeps_the_old_file_and_no_leftover(opened, root, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        opened.write("a/b/file", b"new")
    assert opened.read("a/b/file") == b"content" and os.listdir(root / "a/b") == ["file"]


def test_write_that_the_system_cuts_short_keeps_the_old_file(opened, root, in_child):
    def work() -> str:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(OSError) as caught:
            opened.write("a/b/file", b"x" * 1000)
        return errno.errorcode[caught.value.errno]

    assert in_child(work) == "EFBIG"
    assert (root / "a/b/file").read_bytes() == b"content"
    assert os.listdir(root / "a/b") == ["file"]


def _link(path):
    path.rename(path.with_name("target"))
    path.symlink_to(path.with_name("target"))


#: What is refused of folders and of files.
BAD = [
    (lambda path: path.chmod(path.stat().st_mode & 0o700 | 0o020), r"can be written by other users \(mode 0\d20\)"),
    (lambda path: path.chmod(path.stat().st_mode & 0o700 | 0o002), r"can be written by other users \(mode 0\d02\)"),
    (_link, "is a symbolic link"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["", "a", "a/b", "a/b/file"])
@pytest.mark.parametrize(("spoil", "reason"), BAD)
def test_what_others_can_write_and_links_are_refused(opened, root, name, spoil, reason):
    spoil(root / name)
    with pytest.raises(Defect, match=reason):
        opened.read(name) if name.endswith("file") else Root(str(root)).check_folders("a/b")


@pytest.mark.parametrize("name", ["", "a", "a/b", "a/b/file"])
def test_what_belongs_to_another_user_is_refused(opened, root, name, give_away):
    give_away(root / name)
    with pytest.raises(Defect, match="belongs to user"):
        opened.read(name) if name.endswith("file") else Root(str(root)).check_folders("a/b")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
def test_folder_that_others_can_only_read_is_accepted(opened, root, mode):
    root.chmod(mode)
    (root / "a").chmod(mode)
    Root(str(root)).check_folders("a/b")


def test_folder_of_the_superuser_is_accepted(opened, root, monkeypatch):
    monkeypatch.setattr(ownership, "_SUPERUSER", os.geteuid())
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    Root(str(root)).check_folders("a/b")


@pytest.mark.parametrize("name", ["a", "a/b"])
def test_no_folder_is_made_through_a_link(opened, root, name, tmp_path):
    (root / name).rename(tmp_path / "aside")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (root / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Defect, match="is a symbolic link"):
        opened.make_folders("a/b/c")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_file_in_a_folders_place_is_refused(opened, root):
    (root / "file").write_bytes(b"")
    with pytest.raises(Defect):
        Root(str(root / "file"))
    with pytest.raises(Defect, match="is a regular file, not a folder"):
        opened.check_folders("file")


def test_missing_things_are_told_from_bad_ones(opened, root):
    for act in (
        lambda: Root(str(root / "none")),
        lambda: opened.check_folders("a/none"),
        lambda: opened.read("a/none"),
    ):
        with pytest.raises(Vanished, match="none is missing"):
            act()


@pytest.mark.parametrize(
    ("make", "kind"), [(lambda path: os.mkfifo(path, 0o600), "a named pipe"), (os.mkdir, "a folder")]
)
def test_what_is_no_file_is_refused(opened, root, make, kind):
    (root / "a/b/file").unlink()
    make(root / "a/b/file")
    with pytest.raises(Defect, match=f"is {kind}, not a regular file"):
        opened.read("a/b/file")


def test_write_replaces_a_link_and_spares_its_target(opened, root, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (root / "a/b/file").unlink()
    (root / "a/b/file").symlink_to(target)
    opened.write("a/b/file", b"new")
    assert target.read_bytes() == b"precious"
    assert opened.read("a/b/file") == b"new"


def test_opened_root_is_not_swapped_by_renaming_it(opened, root):
    root.rename(root.with_name("moved"))
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").write_bytes(b"foreign")
    assert opened.read("a/b/file") == b"content"


def _lowest_free_descriptor():
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def test_no_descriptor_is_left_open_by_a_refusal(opened, root):
    (root / "a/b/file").chmod(0o622)
    root.chmod(0o777)
    before = _lowest_free_descriptor()
    for _ in range(3):
        with pytest.raises(Defect):
            Root(str(root))
        with pytest.raises(Defect):
            opened.read("a/b/file")
    assert _lowest_free_descriptor() == before


def test_system_without_user_ids_has_no_ownership_rules(opened, root, monkeypatch):
    root.chmod(0o777)
    (root / "a/b/file").chmod(0o666)
    monkeypatch.delattr(os, "geteuid")
    again = Root(str(root))
    again.check_folders("a/b")
    assert again.read("a/b/file") == b"content"


def test_system_without_folder_descriptors_works_by_full_paths(root, monkeypatch):
    monkeypatch.setattr(trusted_folder, "_BY_DESCRIPTOR", False)
    opened = Root.create(str(root))
    assert opened.descriptor is None
    opened.make_folders("a/b")
    opened.write("a/b/file", b"1")
    assert opened.read("a/b/file") == b"1"
    assert opened.names() == ["a"]
    opened.rename("a", "c")
    opened.remove_tree("c")
    root.chmod(0o770)
    with pytest.raises(Defect, match="can be written by other users"):
        Root(str(root))
    root.chmod(0o700)
    (root.with_name("link")).symlink_to(root)
    with pytest.raises(Defect, match="is a symbolic link"):
        Root(str(root.with_name("link")))
