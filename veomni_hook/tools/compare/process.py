"""One command as a child process in its own group, so that all processes that it starts end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

__all__ = ["Ended", "run", "tail"]

#: How long a script may continue after its last step, for `finally` blocks and exit handlers.
GRACE = 60.0
#: How long it may take to end after each signal.
PATIENCE = (15.0, 5.0, 5.0)
_GROUPS = os.name == "posix"
_POLL = 0.1
_TAIL = 8192
_TRACEBACK = "Traceback (most recent call last)"
#: How exceptions of torchrun and ``accelerate launch`` begin.
_OF_LAUNCHERS = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
    "subprocess.CalledProcessError",
)


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        status: its exit status; negative: the signal.
        ended_by_us: why this process ended it; empty if it ended by itself.
    """

    status: int
    ended_by_us: str = ""


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    cwd: Path | None,
    output: IO[bytes] | None,
    watch: Callable[[], bool],
    limit: float | None,
) -> Ended:
    """Run a command to its end.

    Args:
        command: the program and its arguments.
        environ: its complete environment.
        cwd: its working directory; None: the current one.
        output: receives what it prints; None: standard error.
        watch: called several times per second; returns true once the script has done its last step.
        limit: the seconds after which it is stopped; None: no limit.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; the process and all that it started have ended.
        OSError: it could not be started.
    """
    started = time.monotonic()
    with _ending(command, environ, cwd, output) as process:
        done_at = None
        while True:
            try:
                return Ended(process.wait(_POLL))
            except subprocess.TimeoutExpired:
                pass
            now = time.monotonic()
            if watch() and done_at is None:
                done_at = now
            if done_at is not None and now - done_at > GRACE:
                end(process)
                return Ended(process.returncode, f"it went on for {GRACE:.0f} s after its last step")
            if limit is not None and now - started > limit:
                end(process)
                return Ended(process.returncode, f"it ran for longer than {limit:g} s (--timeout)")


@contextmanager
def _ending(
    command: Sequence[str], environ: Mapping[str, str], cwd: Path | None, output: IO[bytes] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Make sure that the process has ended when the block is left, also by Ctrl-C or SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell starts background jobs with SIGINT ignored, which the process would inherit.
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    try:
        if ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(
                command,
                env=dict(environ),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=2 if output is None else output,
                stderr=2 if output is None else subprocess.STDOUT,
                start_new_session=_GROUPS,
            )
        finally:
            if ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield process
        finally:
            end(process)
    finally:
        signal.signal(signal.SIGTERM, before)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: first with SIGINT, so that it can clean up, then with stronger signals."""
    if process.poll() is not None:
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL) if _GROUPS else (signal.SIGTERM,) * 3
    for number, patience in zip(signals, PATIENCE, strict=True):
        if not _GROUPS:
            process.terminate()
        else:
            os.killpg(process.pid, number)
        try:
            process.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue
        except KeyboardInterrupt:  # the user pressed Ctrl-C again
            continue


def tail(path: Path, lines: int) -> list[str]:
    """Return the last lines that a process printed, without a launcher's traceback.

    torchrun and ``accelerate launch`` end with their own traceback, which only says that a child failed. The
    lines before it give the reason.
    """
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        printed = file.read().decode("utf-8", "replace").rstrip().splitlines()
    starts = [number for number, line in enumerate(printed) if line.startswith(_TRACEBACK)]
    if starts and any(line.lstrip().startswith(_OF_LAUNCHERS) for line in printed[starts[-1] :]):
        printed = printed[: starts[-1]] or printed
    return printed[-lines:]
