"""Starts that are killed while they publish: before every file operation, halfway through every write, at any time.

A kill before an operation stands for one after the operation before it. After each kill every entry that was
complete is still there, and the next start is right and leaves a whole cache. SIGKILL spares what the kernel
has taken, so this says nothing of power failures.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.stress import stand
from tests.stress.result import Line, Part

#: The functions of `os` (and `fcntl`) with which the store works.
OPERATIONS = (
    "open", "close", "mkdir", "stat", "lstat", "fstat", "read", "write", "fsync", "replace", "rename", "unlink",
    "rmdir", "listdir", "scandir", "access",
)  # fmt: skip
#: Fractions of a start's usual duration after which it is killed at random.
_LATEST = 1.1
_ABANDONED = 7200  # seconds; `clear` takes temporary files that are older than an hour


def _nothing(cache: Path) -> None:
    """The cache is empty."""


def _others(cache: Path) -> None:
    """Of three entries two are there."""
    _remove_one(cache, stand.MODULES[1])


def _damaged(cache: Path) -> None:
    """All entries are there; the texts of two are damaged."""
    for path in sorted(cache.rglob("modeling_*.py"))[:2]:
        path.write_bytes(path.read_bytes()[:-9])


def _without_bytecode(cache: Path) -> None:
    """All entries are there, without their bytecode."""
    for path in cache.rglob("*.veomni"):
        path.unlink()


#: In which state the cache is before a start, and whether it is made from a complete one.
SITUATIONS: dict[str, tuple[Callable[[Path], None], bool]] = {
    "an empty cache": (_nothing, False),
    "other entries are there": (_others, True),
    "damaged texts are replaced": (_damaged, True),
    "missing bytecode is replaced": (_without_bytecode, True),
}


def kills(folder: Path, count: int, seed: int) -> Part:
    """Kill at least `count` starts: before each file operation (a sample if they are more), a fifth at any time."""
    began = time.monotonic()
    part = Part("kills", seed)
    trial = _Trial(folder, part)
    draw = random.Random(seed)
    planned = [
        (situation, number, half)
        for situation in SITUATIONS
        for number, name in enumerate(trial.operations(situation))
        for half in ((False, True) if name == "write" else (False,))
    ]
    at_random = max(count - len(planned), count // 5)
    if count < len(planned):
        planned = draw.sample(planned, count - at_random)
    lines = {situation: Line(f"before every file operation, {situation}") for situation in SITUATIONS}
    for situation, number, half in planned:
        trial.at_operation(lines[situation], situation, number, half=half)
    timed = {True: Line("at any time, another start beside it"), False: Line("at any time, alone")}
    attempts = 0
    while sum(line.count for line in timed.values()) < at_random and attempts < 20 * at_random:
        attempts += 1
        beside = draw.random() < 0.5
        trial.at_any_time(
            timed[beside], draw.choice(list(SITUATIONS)), draw.random() * _LATEST, beside=beside
        )
    part.lines = [line for line in (*lines.values(), *timed.values()) if line.count]
    part.seconds = time.monotonic() - began
    return part


class _Trial:
    """One folder, made anew for every kill."""

    def __init__(self, folder: Path, part: Part) -> None:
        self.cache, self.whole = folder / "cache", folder / "whole"
        self.part = part
        stand.prepare(folder)
        self.expected = stand.expected(stand.start(self.cache))
        if self.expected["values"] != stand.VALUES:
            raise RuntimeError(f"a start on an empty cache is wrong: {self.expected}")
        self.keys = len(os.listdir(self.cache / "keys"))
        shutil.copytree(self.cache, self.whole)
        self.duration = self._duration()

    def operations(self, situation: str) -> list[str]:
        """The names of the file operations of a start that nobody kills."""
        self._restore(situation)
        names: list[str] = stand.wait(*stand.fork(lambda: _recorded(lambda: stand.outcome(self.cache))))
        return names

    def at_operation(self, line: Line, situation: str, number: int, *, half: bool) -> None:
        """Kill a start before its operation `number`, or halfway through it, and look."""
        complete = self._restore(situation)
        killing = partial(_kill_at, number, half=half)
        died = stand.wait(*stand.fork(lambda: (killing(), stand.outcome(self.cache))), may_be_killed=True)
        where = f"{situation}, operation {number}{', halfway' if half else ''}"
        if died is not None:
            self.part.fail(line, "failed", f"{where}: the start was not killed: {died}")
        line.count += 1
        self._look(line, where, complete, situation)

    def at_any_time(self, line: Line, situation: str, fraction: float, *, beside: bool) -> None:
        """Kill a start after a fraction of the usual time; counts only where it was still running."""
        complete = self._restore(situation)
        other = stand.fork(lambda: stand.outcome(self.cache)) if beside else None
        child, reading = stand.fork(lambda: stand.outcome(self.cache))
        time.sleep(self.duration * fraction)
        os.kill(child, signal.SIGKILL)
        died = stand.wait(child, reading, may_be_killed=True)
        where = f"{situation}, after {self.duration * fraction * 1000:.2f} ms{', beside another' if beside else ''}"
        if other is not None:
            self._right(line, f"{where}: the other start", stand.wait(*other))
        if died is None:
            line.count += 1
        self._look(line, where, complete, situation)

    def _duration(self) -> float:
        self._restore("an empty cache")
        began = time.monotonic()
        stand.start(self.cache)
        return time.monotonic() - began

    def _restore(self, situation: str) -> dict[str, str]:
        """Make the cache anew; returns the complete entries that it holds, by key."""
        change, from_whole = SITUATIONS[situation]
        shutil.rmtree(self.cache, ignore_errors=True)
        if from_whole:
            shutil.copytree(self.whole, self.cache)
        change(self.cache)
        return complete_entries(self.cache)

    def _look(self, line: Line, where: str, complete: dict[str, str], situation: str) -> None:
        now = complete_entries(self.cache)
        for key in complete.keys() - {key for key, found in now.items() if found == complete.get(key)}:
            self.part.fail(line, "lost", f"{where}: the entry of {key} is gone or another")
        damaged = {path for path, _ in defects(self.cache)}
        if not situation.startswith(("damaged", "missing")) and damaged:
            self.part.fail(line, "lost", f"{where}: a kill left a defect: {damaged}")
        self._right(line, f"{where}: the next start", stand.start(self.cache))
        again = stand.start(self.cache)
        self._right(line, f"{where}: the start after it", again)
        if (held := len(complete_entries(self.cache))) != self.keys or defects(self.cache):
            self.part.fail(
                line, "lost", f"{where}: {held} of {self.keys} entries, defects {defects(self.cache)}"
            )
        if set(again.get("cache", {}).values()) != {"hit"}:
            self.part.fail(line, "failed", f"{where}: the cache was not whole after one start: {again}")
        if left := leftovers(self.cache):
            self.part.fail(line, "failed", f"{where}: `clear` leaves {left}")

    def _right(self, line: Line, what: str, found: stand.Started) -> None:
        if "error" in found or found["warnings"]:
            self.part.fail(line, "failed", f"{what}: {found.get('error') or found['warnings']}")
        elif stand.expected(found) != self.expected:
            self.part.fail(line, "wrong", f"{what}: {stand.expected(found)}")


def _remove_one(cache: Path, module: str) -> None:
    for manifest in (cache / "keys").iterdir():
        if f'"module": "{module}"' in manifest.read_text():
            manifest.unlink()
    for path in cache.glob(f"*/*/models/*/{module.rpartition('.')[2]}.py"):
        shutil.rmtree(path.parents[2])


def complete_entries(cache: Path) -> dict[str, str]:
    """The keys that a lookup would answer, each with its text's path (or that no patch applies) and text."""
    from veomni_hook.cache import entry
    from veomni_hook.cache.inventory import manifests_of, open_root
    from veomni_hook.cache.trusted_folder import Defect

    found: dict[str, str] = {}
    root = open_root(str(cache))
    if root is None:
        return found
    with root:
        for key, manifest in manifests_of(root).items():
            if isinstance(manifest, Defect):
                continue
            try:
                found[key] = entry.load(root, manifest)[1].decode() if manifest.patch_hash else "unpatched"
            except Defect:
                continue
    return found


def defects(cache: Path) -> list[tuple[str, str]]:
    """What `veomni-hook cache verify` says."""
    from veomni_hook.cache.store import Store

    return [(one.path, one.reason) for one in Store(cache).verify().defects]


def leftovers(cache: Path) -> list[str]:
    """What is left of a cache after its temporary files have aged and all of it was cleared."""
    from veomni_hook.cache.store import Store

    past = time.time() - _ABANDONED
    for path in cache.rglob("*.tmp"):
        os.utime(path, (past, past))
    Store(cache).clear()
    return [str(path) for path in cache.rglob("*")]


def _recorded(work: Callable[[], Any]) -> list[str]:
    names: list[str] = []
    _watch(lambda name, call, *_: (names.append(name), call())[1])
    work()
    return names


def _kill_at(number: int, *, half: bool) -> None:
    """From now on this process dies at its file operation `number`."""
    numbers: Iterator[int] = iter(range(10**9))

    def met(name: str, call: Callable[[], Any], *arguments: Any) -> Any:
        if next(numbers) != number:
            return call()
        if half:
            descriptor, data = arguments
            _os_write(descriptor, bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    _watch(met)


_os_write = os.write


def _watch(meet: Callable[..., Any]) -> None:
    """Call `meet(name, call, *arguments)` in place of each file operation of this process."""
    import fcntl

    for home, names in ((os, OPERATIONS), (fcntl, ("flock",))):
        for name in names:
            real = getattr(home, name)

            def met(*arguments: Any, _name: str = name, _real: Any = real, **options: Any) -> Any:
                return meet(_name, partial(_real, *arguments, **options), *arguments)

            setattr(home, name, met)
