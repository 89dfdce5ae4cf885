"""What can be done to a stored module: everything that docs/data/tamperings.json says is noticed, by the names used there.

Each function spoils one stored module on the disk. None needs another user's rights, but for those in
`OF_ANOTHER_USER`.
"""

from __future__ import annotations

import marshal
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from veomni_hook.cache import entry, key

STRANGER = 4242


@dataclass(frozen=True)
class Stored:
    """One stored module: the cache's folder, and below it the text, its bytecode and the manifest."""

    root: Path
    text: Path
    bytecode: Path
    manifest: Path

    @classmethod
    def of(cls, root: Path, hit_path: str, stage1: str) -> Stored:
        """Of a hit's path and its first-stage key."""
        text = Path(hit_path)
        name = entry.bytecode_name(text.relative_to(root).as_posix(), key.interpreter_tag())
        return cls(root, text, root / name, root / entry.KEYS / stage1)

    @property
    def files(self) -> dict[str, Path]:
        """The three files by the names that the document has for them."""
        return {"text": self.text, "bytecode": self.bytecode, "manifest": self.manifest}


def _edited(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])


def _linked(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def _piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _foldered(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


_TO_A_FILE: dict[str, Callable[[Path], None]] = {
    "emptied": lambda path: path.write_bytes(b"") and None,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]) and None,
    "extended": lambda path: path.write_bytes(path.read_bytes() + b"\n") and None,
    "edited": _edited,
    "removed": lambda path: path.unlink(),
    "linked": _linked,
    "piped": _piped,
    "foldered": _foldered,
    "writable": lambda path: path.chmod(0o666),
}


def _resealed(payload: bytes, data: bytes) -> bytes:
    """A container with another payload, and the right length and seal for it."""
    size = len(payload).to_bytes(entry._LENGTH_SIZE, "little")
    text_seal = data[entry._TEXT_SEAL_AT : entry._PAYLOAD_SEAL_AT]
    return data[: entry._LENGTH_AT] + size + text_seal + entry.seal(payload) + payload


def _container(change: Callable[[bytes], bytes]) -> Callable[[Stored], None]:
    def spoil(stored: Stored) -> None:
        stored.bytecode.write_bytes(change(stored.bytecode.read_bytes()))

    return spoil


def _manifest_of_another_key(stored: Stored) -> None:
    _, _, body = stored.manifest.read_bytes().partition(b"\n")
    body = body.replace(stored.manifest.name.encode(), b"cd" * 20, 1)
    stored.manifest.write_bytes(entry.seal(body).hex().encode() + b"\n" + body)


def _moved(stored: Stored) -> None:
    """Another cache in the place of this one, as a backup or a CI cache puts it back under another path."""
    data = stored.bytecode.read_bytes()
    code = marshal.loads(data[entry._PAYLOAD_AT :])
    elsewhere = code.replace(co_filename="/elsewhere/module.py")
    stored.bytecode.write_bytes(_resealed(marshal.dumps(elsewhere), data))


def _forged(stored: Stored) -> None:
    """Other code under the right name, sealed as the cache seals."""
    data = stored.bytecode.read_bytes()
    code = compile("FORGED = True", str(stored.text), "exec", dont_inherit=True)
    stored.bytecode.write_bytes(_resealed(marshal.dumps(code), data))


def _to_folders(change: Callable[[Path], None]) -> Callable[[Stored], None]:
    return lambda stored: change(stored.text.parent)


TAMPERINGS: dict[str, Callable[[Stored], None]] = {
    **{
        f"{name}-{done}": lambda stored, name=name, spoil=spoil: spoil(stored.files[name])  # type: ignore[misc]
        for name in ("text", "bytecode", "manifest")
        for done, spoil in _TO_A_FILE.items()
    },
    "bytecode-magic": _container(lambda data: b"\0" + data[1:]),
    "bytecode-interpreter": _container(lambda data: data[: entry._TAG_AT] + b"other" + data[entry._TAG_AT + 5 :]),
    "bytecode-build": _container(lambda data: data[: entry._PYTHON_MAGIC_AT] + b"\0\0\r\n" + data[entry._TAG_AT :]),
    "bytecode-of-another-text": _container(lambda data: data[: entry._TEXT_SEAL_AT] + b"\0" * 8 + data[entry._PAYLOAD_SEAL_AT :]),
    "bytecode-garbage": _container(lambda data: _resealed(b"\xe3\x01", data)),
    "bytecode-no-code": _container(lambda data: _resealed(marshal.dumps(42), data)),
    "bytecode-moved": _moved,
    "manifest-of-another-key": _manifest_of_another_key,
    "folder-writable": _to_folders(lambda path: path.chmod(0o777)),
    "folder-linked": _to_folders(_linked),
    "folder-removed": _to_folders(lambda path: shutil.rmtree(path)),
    "cache-writable": lambda stored: stored.root.chmod(0o777),
    "cache-linked": lambda stored: _linked(stored.root),
}  # fmt: skip

#: Those that only the superuser can do, or another user beforehand.
OF_ANOTHER_USER: dict[str, Callable[[Stored], None]] = {
    **{
        f"{name}-of-another-user": lambda stored, name=name: os.chown(stored.files[name], STRANGER, -1)  # type: ignore[misc]
        for name in ("text", "bytecode", "manifest")
    },
    "folder-of-another-user": lambda stored: os.chown(stored.text.parent, STRANGER, -1),
    "cache-of-another-user": lambda stored: os.chown(stored.root, STRANGER, -1),
}

#: What nothing notices: whoever can write as the user can also seal.
FORGERIES: dict[str, Callable[[Stored], None]] = {"bytecode-forged": _forged}
