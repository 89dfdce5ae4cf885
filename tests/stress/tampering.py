"""Every tampering of `tamperings` with a complete cache, each followed by two starts and a look at what they did."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.stress import stand
from tests.stress.result import Line, Part
from tests.stress.tamperings import (
    EVERY_BYTE,
    FILES,
    FOLDERS,
    HARMLESS,
    LEASE,
    REPAIRED,
    ROOT,
    TAMPERINGS,
    Scene,
    Tampering,
)

ANOTHER_USER = 4242
#: Of the flipped bits, every so many are followed by starts; all are looked up.
STARTED = 10
TEXT_OF_ANOTHER_RELEASE = "raise RuntimeError('of another release')\n"


def tampering(folder: Path, flips: int, seed: int, names: Sequence[str] = ()) -> Part:
    """Try every tampering on every piece, and flip a bit in every byte of it.

    With `flips`, in that many bytes, and each tampering once, on one of its pieces. With `names`, these alone.
    """
    began = time.monotonic()
    part = Part("tampering", seed)
    trial = _Trial(folder, part, random.Random(seed))
    for one in TAMPERINGS:
        if names and one.name not in names:
            continue
        line = Line(one.name)
        for piece in [trial.draw.choice(one.pieces)] if flips else one.pieces:
            if one.times == EVERY_BYTE:
                trial.every_byte(line, one, piece, flips)
            else:
                for _ in range(1 if flips else one.times):
                    trial.attempt(line, one, piece)
        part.lines.append(line)
    part.seconds = time.monotonic() - began
    return part


class _Trial:
    """A cache that is made anew for every tampering."""

    def __init__(self, folder: Path, part: Part, draw: random.Random) -> None:
        self.folder, self.part, self.draw = folder, part, draw
        self.cache, self.whole = folder / "cache", folder / "whole"
        stand.prepare(folder)
        self.expected = stand.expected(stand.start(self.cache))
        if self.expected["values"] != stand.VALUES:
            raise RuntimeError(f"a start on an empty cache is wrong: {self.expected}")
        self.keys = _keys(self.cache)
        names = {name: self._pieces(name) for name in stand.PATCHED[:2]}
        self.pieces = names[stand.PATCHED[0]]
        self.others = names[stand.PATCHED[1]]
        shutil.copytree(self.cache, self.whole)
        self.foreign = self._of_another_release()

    def every_byte(self, line: Line, one: Tampering, piece: str, count: int) -> None:
        """Change every byte of a piece (0: all; else so many), one at a time, and look the module up.

        Of every `STARTED` bytes one is also followed by starts.
        """
        every = range(self.pieces[piece].stat().st_size)
        chosen = list(every) if not count or count >= len(every) else sorted(self.draw.sample(every, count))
        for byte in chosen[::STARTED]:
            self.attempt(line, one, piece, byte)
        scene, path = self._scene(), self.pieces[piece]
        right, module = path.read_bytes(), _module(piece)
        for byte in chosen:
            line.count += byte not in chosen[::STARTED]
            one.act(replace(scene, byte=byte), piece)
            kind, reason = _looked_up(self.cache, self.keys[module], module)
            if kind != "Miss" or not reason:
                self.part.fail(line, "wrong", f"{one.name} ({piece}, byte {byte}): {kind} {reason}")
            path.write_bytes(right)

    def attempt(self, line: Line, one: Tampering, piece: str, byte: int = 0) -> None:
        """Tamper, look the modules up, and start, and both once more."""
        line.count += 1
        where = f"{one.name} ({piece}{f', byte {byte}' if one.times == EVERY_BYTE else ''})"
        scene = self._scene(byte)
        before = _content(scene.outside)
        one.act(scene, piece)
        moved = {path for path in scene.outside.rglob("*")} - before.keys()
        outcome = one.comes_to(piece)
        try:
            with self._owned():
                for number in ("first", "second"):
                    found = stand.wait(*stand.fork(self._tried))
                    self._judge(
                        line, f"{where}, {number} start", found, outcome, piece, first=number == "first"
                    )
        finally:
            for descriptor in scene.locks:
                os.close(descriptor)
        if scene.canary.exists():
            self.part.fail(line, "wrong", f"{where}: what was planted was executed")
        after = {path: data for path, data in _content(scene.outside).items() if path not in moved}
        if {path: data for path, data in before.items() if path in after} != after:
            self.part.fail(line, "failed", f"{where}: something outside of the cache was changed")

    def _tried(self) -> dict[str, Any]:
        looked = {module: _looked_up(self.cache, key, module) for module, key in self.keys.items()}
        return {"looked": looked, "start": stand.outcome(self.cache)}

    def _judge(
        self, line: Line, where: str, found: dict[str, Any], outcome: str, piece: str, *, first: bool
    ) -> None:
        if "error" in found:
            self.part.fail(line, "failed", f"{where}: {found['error']}")
            return
        started = found["start"]
        if stand.expected(started) != self.expected:
            self.part.fail(line, "wrong", f"{where}: {stand.expected(started)}")
        concerned = stand.PATCHED if piece in (ROOT, *FOLDERS[:2]) else (_module(piece),)
        looked = [found["looked"][module] for module in concerned]
        missed = [kind == "Miss" for kind, _ in looked]
        if any(kind == "Miss" and not reason for kind, reason in looked):
            self.part.fail(line, "failed", f"{where}: a miss without a reason")
        if outcome == HARMLESS or (outcome == REPAIRED and not first):
            if any(missed) or set(started["cache"].values()) != {"hit"}:
                self.part.fail(line, "lost", f"{where}: {found['looked']}, {started['cache']}")
        elif not all(missed):
            self.part.fail(line, "wrong", f"{where}: what was tampered with is a hit")

    def _scene(self, byte: int = 0) -> Scene:
        for path in (self.cache, self.folder / "tmp", self.folder / "outside"):
            _clean(path)
        shutil.copytree(self.whole, self.cache, symlinks=True)
        (self.folder / "tmp").mkdir()
        outside = self.folder / "outside"
        (outside / "folder").mkdir(parents=True)
        (outside / "folder").chmod(0o700)
        for path in (outside / "precious", outside / "folder" / "file"):
            path.write_text("precious\n")
            path.chmod(0o600)
        self.given: list[tuple[int, int]] = []
        canary = self.folder / "canary"
        canary.unlink(missing_ok=True)
        return Scene(
            self.cache, self.pieces, self.others, self.foreign, outside, self.draw, canary, self._give_away,
            byte,
        )  # fmt: skip

    def _give_away(self, path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, ANOTHER_USER, ANOTHER_USER, follow_symlinks=False)
        else:
            status = path.stat()
            self.given.append((status.st_dev, status.st_ino))

    @contextmanager
    def _owned(self) -> Iterator[None]:
        """While files cannot be given away, the starts are told that some belong to another user."""
        if not self.given:
            yield
            return

        def told(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
            def status(*arguments: Any, **options: Any) -> os.stat_result:
                found = real(*arguments, **options)
                if (found.st_dev, found.st_ino) not in self.given:
                    return found
                fields = list(found)
                fields[4] = ANOTHER_USER
                return os.stat_result(fields)

            return status

        with patch.object(os, "stat", told(os.stat)), patch.object(os, "fstat", told(os.fstat)):
            with (
                patch.object(os, "lstat", told(os.lstat)),
                patch.object(os, "supports_dir_fd", {*os.supports_dir_fd, os.stat}),
            ):
                yield

    def _pieces(self, module: str) -> dict[str, Path]:
        text = next(self.cache.glob(f"*/*/models/*/{module.rpartition('.')[2]}.py"))
        entry = text.parents[2]
        return {
            "text": text,
            "bytecode": next((text.parent / "__pycache__").iterdir()),
            "manifest": self.cache / "keys" / self.keys[module],
            "unpatched manifest": self.cache / "keys" / self.keys[stand.MODULES[2]],
            LEASE: entry / ".lease",
            "entry": entry,
            ROOT: self.cache,
            **dict(
                zip(
                    FOLDERS,
                    (self.cache / "keys", entry.parent, entry, text.parent, text.parent / "__pycache__"),
                    strict=True,
                )
            ),
        }

    def _of_another_release(self) -> dict[str, Path]:
        """The pieces of the first module as another release of it would be stored in the same cache."""
        from veomni_hook.cache import lease
        from veomni_hook.cache.store import Hit, Store

        found = Store(self.cache).publish(
            "ab" * 20,
            module=stand.PATCHED[0],
            distribution="transformers",
            version="5.98.0",
            patch_hash=self.pieces["entry"].name,
            text=TEXT_OF_ANOTHER_RELEASE,
            report={},
        )
        if not isinstance(found, Hit):
            raise RuntimeError(f"another release cannot be stored: {found}")
        lease.release(str(self.cache))
        text = Path(found.path)
        held = {
            "text": text,
            "bytecode": next((text.parent / "__pycache__").iterdir()),
            "manifest": self.cache / "keys" / ("ab" * 20),
        }
        kept = self.folder / "foreign"
        kept.mkdir()
        return {name: Path(shutil.copy(path, kept / name)) for name, path in held.items()}


def _module(piece: str) -> str:
    """The module whose piece it is."""
    return stand.MODULES[2] if piece == "unpatched manifest" else stand.PATCHED[0]


def _keys(cache: Path) -> dict[str, str]:
    from veomni_hook.cache.entry import Manifest
    from veomni_hook.cache.inventory import manifests_of, open_root

    root = open_root(str(cache))
    assert root is not None
    with root:
        return {held.module: key for key, held in manifests_of(root).items() if isinstance(held, Manifest)}


def _looked_up(cache: Path, key: str, module: str) -> tuple[str, str]:
    from veomni_hook.cache.store import Store

    found = Store(os.path.realpath(cache)).lookup(key, module)
    return type(found).__name__, getattr(found, "reason", "")


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def _clean(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


assert set(FILES) <= {piece for one in TAMPERINGS for piece in one.pieces}
