"""Every tampering with the cache that the suite tries, by name: what is done, to what, and what has to come of it.

This list is data: `docs/data/stress.json` is written from it. Those that docs/security.md names are among them. Whoever can
write as the user can also write what the seals accept; such forgeries are not.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.cache import tampering as documented

#: What has to come of a tampering. Nothing of it is ever executed.
REPAIRED = "a miss with its reason, and the next start finds a whole cache"
REFUSED = "a miss with its reason; nothing is stored there, and every start is right without it"
HARMLESS = "a hit: what is executed is what was stored, or nothing looks at it"

#: The files of an entry, and the manifest of a module to which no patch applies.
FILES = ("text", "bytecode", "manifest", "unpatched manifest")
LEASE = "lock file"
FOLDERS = (
    "folder of manifests", "folder of the release", "folder of the entry", "folder of the text",
    "folder of the bytecode",
)  # fmt: skip
ROOT = "the cache's folder"
EVERY_BYTE = -1


@dataclass(frozen=True)
class Scene:
    """A complete cache that may be changed.

    Attributes:
        cache: its folder.
        pieces: the path of every piece of one module's entry, by name.
        others: the same pieces of another module's entry.
        foreign: the same pieces for the same module, of another release of it, made elsewhere.
        outside: a folder outside the cache with a file ``precious``.
        draw: random numbers.
        canary: a file that only tampered code makes.
        owned: told of a path that shall belong to another user.
        byte: which byte of a piece to change, where every byte is changed once.
        locks: open descriptors that hold a lock.
    """

    cache: Path
    pieces: dict[str, Path]
    others: dict[str, Path]
    foreign: dict[str, Path]
    outside: Path
    draw: random.Random
    canary: Path
    owned: Callable[[Path], None]
    byte: int = 0
    locks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Tampering:
    """One tampering: its name and description, the pieces it is tried on, what comes of it, and how often.

    `act` changes one piece. `outcomes` are exceptions by piece. It is tried `times` on each piece, or
    (`EVERY_BYTE`) once for each of its bytes.
    """

    name: str
    description: str
    pieces: tuple[str, ...]
    act: Callable[[Scene, str], None]
    outcome: str = REPAIRED
    outcomes: tuple[tuple[str, str], ...] = ()
    times: int = 1

    def comes_to(self, piece: str) -> str:
        """What has to come of it at a piece."""
        return dict(self.outcomes).get(piece, self.outcome)


def _edit(change: Callable[[bytes, random.Random], bytes]) -> Callable[[Scene, str], None]:
    def act(scene: Scene, piece: str) -> None:
        path = scene.pieces[piece]
        path.write_bytes(change(path.read_bytes(), scene.draw))

    return act


def _bit_flipped(scene: Scene, piece: str) -> None:
    path = scene.pieces[piece]
    data = bytearray(path.read_bytes())
    data[scene.byte] ^= 1 << scene.draw.randrange(8)
    path.write_bytes(data)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(1, len(data))]


def _zeros_at_the_end(data: bytes, draw: random.Random) -> bytes:
    kept = draw.randrange(len(data) - 1)
    return data[:kept] + bytes(len(data) - kept)


def _middle_removed(data: bytes, draw: random.Random) -> bytes:
    first, last = sorted(draw.sample(range(len(data)), 2))
    return data[:first] + data[last:]


def _two_bytes_swapped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    while bytes(changed) == data:
        one, other = draw.randrange(len(data)), draw.randrange(len(data))
        changed[one], changed[other] = changed[other], changed[one]
    return bytes(changed)


def _planted(scene: Scene) -> str:
    """Source that shows that it was executed."""
    return f"open({str(scene.canary)!r}, 'w').close()\n"


def _code_planted(scene: Scene, piece: str) -> None:
    path = scene.pieces[piece]
    if piece == "bytecode":
        import marshal

        from veomni_hook.cache import entry

        # The header is kept, so that only the seal tells.
        code = compile(_planted(scene), str(scene.pieces["text"]), "exec")
        payload = marshal.dumps(code)
        head = path.read_bytes()[: entry._PAYLOAD_AT]
        length = len(payload).to_bytes(8, "little")
        path.write_bytes(head[: entry._LENGTH_AT] + length + head[entry._TEXT_SEAL_AT :] + payload)
    else:
        path.write_bytes(path.read_bytes() + b"\n" + _planted(scene).encode())


def _plain_pyc(scene: Scene, piece: str) -> None:
    from importlib._bootstrap_external import _code_to_timestamp_pyc  # type: ignore[import-not-found]

    code = compile(_planted(scene), str(scene.pieces["text"]), "exec")
    scene.pieces[piece].write_bytes(_code_to_timestamp_pyc(code))


def _of_another_build(scene: Scene, piece: str) -> None:
    data = bytearray(scene.pieces[piece].read_bytes())
    data[8:12] = b"\x01\x00\r\n"
    scene.pieces[piece].write_bytes(data)


def _of_another_tag(scene: Scene, piece: str) -> None:
    data = scene.pieces[piece].read_bytes()
    scene.pieces[piece].write_bytes(data.replace(b"python-", b"pypyxx-", 1))


def _copied(source: str, *names: str) -> Callable[[Scene, str], None]:
    """The piece, or these, of the scene's ``others`` or ``foreign`` in place of its own."""

    def act(scene: Scene, piece: str) -> None:
        for name in names or (piece,):
            shutil.copyfile(getattr(scene, source)[name], scene.pieces[name])

    return act


def _exchanged(scene: Scene, piece: str) -> None:
    one, other = scene.pieces[piece], scene.others[piece]
    aside = scene.outside / "aside"
    shutil.move(one, aside)
    shutil.move(other, one)
    shutil.move(aside, other)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _removed(scene: Scene, piece: str) -> None:
    _remove(scene.pieces[piece])


def _emptied_folder(scene: Scene, piece: str) -> None:
    _remove(scene.pieces[piece])
    scene.pieces[piece].mkdir(mode=0o700)


def _link_to_itself_moved(scene: Scene, piece: str) -> None:
    path, moved = scene.pieces[piece], scene.outside / "moved"
    shutil.move(path, moved)
    path.symlink_to(moved)


def _link_to(name: str) -> Callable[[Scene, str], None]:
    def act(scene: Scene, piece: str) -> None:
        _remove(scene.pieces[piece])
        scene.pieces[piece].symlink_to(scene.outside / name)

    return act


def _hard_link_to_another_file(scene: Scene, piece: str) -> None:
    _remove(scene.pieces[piece])
    os.link(scene.outside / "precious", scene.pieces[piece])


def _second_hard_link(scene: Scene, piece: str) -> None:
    os.link(scene.pieces[piece], scene.outside / "second name")


def _pipe(scene: Scene, piece: str) -> None:
    _remove(scene.pieces[piece])
    os.mkfifo(scene.pieces[piece], 0o600)


def _socket(scene: Scene, piece: str) -> None:
    path = scene.pieces[piece]
    _remove(path)
    with socket.socket(socket.AF_UNIX) as bound:
        before = os.getcwd()
        os.chdir(path.parent)  # the address of a socket is short
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)
    path.chmod(0o600)


def _full_folder_for_a_file(scene: Scene, piece: str) -> None:
    _emptied_folder(scene, piece)
    (scene.pieces[piece] / "file").write_text("content")


def _file_for_a_folder(scene: Scene, piece: str) -> None:
    _remove(scene.pieces[piece])
    scene.pieces[piece].write_text(_planted(scene))


def _mode(bits: int) -> Callable[[Scene, str], None]:
    def act(scene: Scene, piece: str) -> None:
        path = scene.pieces[piece]
        path.chmod(stat.S_IMODE(path.stat().st_mode) | bits)

    return act


def _owner(scene: Scene, piece: str) -> None:
    scene.owned(scene.pieces[piece])


def _times(seconds: float) -> Callable[[Scene, str], None]:
    return lambda scene, piece: os.utime(scene.pieces[piece], (seconds, seconds))


def _foreign_files(scene: Scene, piece: str) -> None:
    for name in (".x.tmp", "notes.txt", "__init__.py", "sitecustomize.py", ".hidden"):
        (scene.pieces[piece] / name).write_text(_planted(scene))


def _planted_pyc(scene: Scene, piece: str) -> None:
    """What CPython itself would execute in place of the text, checked by nothing: an unchecked hash-based file."""
    from importlib._bootstrap_external import _code_to_hash_pyc
    from importlib.util import cache_from_source, source_hash

    text = scene.pieces["text"]
    code = compile(_planted(scene), str(text), "exec")
    target = Path(cache_from_source(str(text)))
    target.write_bytes(_code_to_hash_pyc(code, source_hash(text.read_bytes()), False))


def _locked(scene: Scene, piece: str) -> None:
    import fcntl

    # A lock belongs to the open file: it is held until whoever tries tamperings closes the descriptor.
    descriptor = os.open(scene.pieces[piece], os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    scene.locks.append(descriptor)


def _all_but_the_manifest(scene: Scene, piece: str) -> None:
    for name in ("text", "bytecode"):
        scene.pieces[name].unlink()


def _copied_from_elsewhere(scene: Scene, piece: str) -> None:
    """Bytecode that was compiled as a file of another folder, as in a cache that was moved."""
    import marshal

    from veomni_hook.cache import entry

    path = scene.pieces[piece]
    seal = scene.pieces["text"].read_bytes()
    moved = compile(seal, str(scene.outside / "modeling.py"), "exec", dont_inherit=True)
    head = path.read_bytes()[: entry._LENGTH_AT]
    payload = marshal.dumps(moved)
    path.write_bytes(
        head + len(payload).to_bytes(8, "little") + entry.seal(seal) + entry.seal(payload) + payload
    )


def _sealed_as_it_is(scene: Scene, piece: str, payload: bytes) -> None:
    from veomni_hook.cache import entry

    path = scene.pieces[piece]
    data = path.read_bytes()
    head = data[: entry._LENGTH_AT] + len(payload).to_bytes(8, "little")
    path.write_bytes(
        head + data[entry._TEXT_SEAL_AT : entry._PAYLOAD_SEAL_AT] + entry.seal(payload) + payload
    )


def _no_code(scene: Scene, piece: str) -> None:
    import marshal

    _sealed_as_it_is(
        scene, piece, scene.draw.choice([marshal.dumps(42), marshal.dumps([1]), b"", b"\xe3\x01", b"garbage"])
    )


def _no_manifest(scene: Scene, piece: str) -> None:
    from veomni_hook.cache import entry

    body = scene.draw.choice([b"", b"null\n{}\n", b"[]\n{}\n", b"{\n{}\n", b"\xff\n", b'{"key": 1}\n{}\n'])
    scene.pieces[piece].write_bytes(entry.seal(body).hex().encode() + b"\n" + body)


_ENTRY = ("entry",)
_SEALED = ("text", "bytecode", "manifest")
_OF_FOLDERS = (*FOLDERS, ROOT)


def _documented() -> Iterator[Tampering]:
    """Those that docs/security.md lists by name, done as its own test does them."""
    for name, spoil in {**documented.TAMPERINGS, **documented.OF_ANOTHER_USER}.items():

        def act(scene: Scene, piece: str, spoil: Callable[[documented.Stored], None] = spoil) -> None:
            pieces = (scene.pieces[one] for one in _SEALED)
            spoil(documented.Stored(scene.cache, *pieces))

        refused = name.endswith("-foldered") or name in _REFUSED_OF_THEM
        yield Tampering(
            f"`{name}`", "as docs/security.md says", _ENTRY, act, REFUSED if refused else REPAIRED
        )


_REFUSED_OF_THEM = (
    "folder-writable", "folder-linked", "folder-of-another-user", "cache-writable", "cache-of-another-user",
)  # fmt: skip

TAMPERINGS: tuple[Tampering, ...] = (
    # What is in a file.
    Tampering("emptied", "a file of no bytes", FILES, _edit(lambda data, draw: b"")),
    Tampering("bit flipped", "one bit of one byte, for every byte", FILES, _bit_flipped, times=EVERY_BYTE),
    Tampering("truncated", "cut at a random place", FILES, _edit(_cut), times=10),
    Tampering("one byte short", "without its last byte", FILES, _edit(lambda data, draw: data[:-1])),
    Tampering("one byte long", "with a byte more at the end", FILES, _edit(lambda data, draw: data + b"\n")),
    Tampering("doubled", "its content twice", FILES, _edit(lambda data, draw: data * 2)),
    Tampering("hole", "some bytes of the middle removed", FILES, _edit(_middle_removed), times=5),
    Tampering("zeroed", "as many zeros", FILES, _edit(lambda data, draw: bytes(len(data)))),
    Tampering("zeros at the end", "zeros from a random place on, as after a crash of the system", FILES, _edit(_zeros_at_the_end), times=5),
    Tampering("random bytes", "as many random bytes", FILES, _edit(lambda data, draw: draw.randbytes(len(data))), times=5),
    Tampering("bytes exchanged", "two bytes in each other's place", FILES, _edit(_two_bytes_swapped), times=10),
    Tampering("other line endings", "copied in text mode", FILES, _edit(lambda data, draw: data.replace(b"\n", b"\r\n") if b"\n" in data else data + b"\r\n")),
    Tampering("code planted", "other code, under the old seals", _SEALED, _code_planted),
    Tampering("plain .pyc", "a file as CPython writes it, in the bytecode's place", ("bytecode",), _plain_pyc),
    Tampering("no code", "sealed bytes that are no code object", ("bytecode",), _no_code, times=5),
    Tampering("no manifest", "sealed bytes that are no manifest", ("manifest", "unpatched manifest"), _no_manifest, times=5),
    Tampering("another build's", "the magic number of another Python build", ("bytecode",), _of_another_build),
    Tampering("another interpreter's", "the tag of another interpreter", ("bytecode",), _of_another_tag),
    Tampering("compiled elsewhere", "bytecode that names another file, as in a cache that was moved", ("bytecode",), _copied_from_elsewhere),
    # Of whom a file is.
    Tampering("another module's", "the same piece of another module's entry, copied over it", _SEALED, _copied("others")),
    Tampering("another release's", "the same piece, stored for another release of the module", _SEALED, _copied("foreign")),
    Tampering("exchanged", "two modules' pieces in each other's place", _SEALED, _exchanged),
    Tampering("another module's entry", "all pieces of another module, copied over this one's", _ENTRY, _copied("others", *_SEALED)),
    Tampering("another release's entry", "all pieces of another release, copied over this one's", _ENTRY, _copied("foreign", *_SEALED)),
    # What stands in a file's place.
    Tampering("missing", "removed", (*FILES, LEASE), _removed),
    Tampering("manifest alone", "text and bytecode removed", _ENTRY, _all_but_the_manifest),
    Tampering("link to a copy", "a symbolic link to the file itself, moved out of the cache", (*FILES, LEASE), _link_to_itself_moved, outcomes=((LEASE, REFUSED),)),
    Tampering("link to another file", "a symbolic link to a file outside of the cache, which stays as it is", (*FILES, LEASE), _link_to("precious"), outcomes=((LEASE, REFUSED),)),
    Tampering("dangling link", "a symbolic link to nothing", (*FILES, LEASE), _link_to("nothing"), outcomes=((LEASE, REFUSED),)),
    Tampering("hard link to another file", "a hard link to a file outside of the cache, which stays as it is", FILES, _hard_link_to_another_file),
    Tampering("second hard link", "a second name outside of the cache", (*FILES, LEASE), _second_hard_link, HARMLESS),
    Tampering("named pipe", "a named pipe, at which a start must not wait", (*FILES, LEASE), _pipe, outcomes=((LEASE, REFUSED),)),
    Tampering("socket", "a socket", (*FILES, LEASE), _socket, outcomes=((LEASE, REFUSED),)),
    Tampering("folder", "an empty folder", (*FILES, LEASE), _emptied_folder, REFUSED),
    Tampering("full folder", "a folder with a file", (*FILES, LEASE), _full_folder_for_a_file, REFUSED),
    # Who could have written it.
    Tampering("group can write", "mode g+w", (*FILES, LEASE), _mode(0o020), outcomes=((LEASE, REFUSED),)),
    Tampering("others can write", "mode o+w", (*FILES, LEASE), _mode(0o002), outcomes=((LEASE, REFUSED),)),
    Tampering("another user's", "owned by another user", (*FILES, LEASE), _owner, outcomes=((LEASE, REFUSED),)),
    Tampering("others can read", "mode go+r", (*FILES, LEASE), _mode(0o044), HARMLESS),
    # Folders.
    Tampering("folder: group can write", "mode g+w", _OF_FOLDERS, _mode(0o020), REFUSED),
    Tampering("folder: others can write", "mode o+w", _OF_FOLDERS, _mode(0o002), REFUSED),
    Tampering("folder: another user's", "owned by another user", _OF_FOLDERS, _owner, REFUSED),
    Tampering("folder: link to a copy", "a symbolic link to the folder itself, moved out of the cache", FOLDERS, _link_to_itself_moved, REFUSED),
    Tampering("folder: link to another", "a symbolic link to a folder outside of the cache, which stays as it is", FOLDERS, _link_to("folder"), REFUSED),
    Tampering("folder: dangling link", "a symbolic link to nothing", FOLDERS, _link_to("nothing"), REFUSED),
    Tampering("folder: file", "a file", _OF_FOLDERS, _file_for_a_folder, REFUSED),
    Tampering("folder: named pipe", "a named pipe, at which a start must not wait", _OF_FOLDERS, _pipe, REFUSED),
    Tampering("folder: missing", "removed with all that it holds", _OF_FOLDERS, _removed),
    Tampering("folder: emptied", "an empty folder", _OF_FOLDERS, _emptied_folder),
    Tampering("folder: moved", "the cache's own folder is a link of this user's to where it was moved", (ROOT,), _link_to_itself_moved),
    # What nothing looks at.
    Tampering("old times", "modification times of 1970", (*FILES, LEASE, *_OF_FOLDERS), _times(1), HARMLESS),
    Tampering("times to come", "modification times of 2100", (*FILES, LEASE, *_OF_FOLDERS), _times(4102444800), HARMLESS),
    Tampering("foreign files", "other files beside it, among them modules that Python imports by name", _OF_FOLDERS, _foreign_files, HARMLESS),
    Tampering("planted .pyc", "an unchecked .pyc beside the bytecode, as CPython would take it for the text", _ENTRY, _planted_pyc, HARMLESS),
    Tampering("locked", "the lock file is locked by another process, as while `cache clear` removes the entry", (LEASE,), _locked, REFUSED),
    *_documented(),
)  # fmt: skip
