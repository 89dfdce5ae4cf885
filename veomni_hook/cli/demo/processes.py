"""The processes of the demo: two trainings that run alternately, and the probe.

Each of them prints `ready`, waits for a line, and writes its results to a JSON file. This process only starts
them and tells them when to run: while one of them is timed, no other runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import typer

from veomni_hook.cli import output
from veomni_hook.cli.usage import FOUND

__all__ = ["Worker", "gather", "train_by_turns"]

TRAINING = "training"


class Worker:
    """A process that runs in turns with others.

    Args:
        command: the command to run; OUTPUT in it is replaced with the JSON file that the process must write.
        environment: its complete environment.
        label: its name in errors: `the training with the hook`.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], label: str) -> None:
        self.label = label
        self.running = True
        self._said: list[str] = []
        self._folder = tempfile.TemporaryDirectory()
        self._result = Path(self._folder.name, "result.json")
        self._process = subprocess.Popen(
            [str(self._result) if word == "OUTPUT" else word for word in command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )

    def until(self, *words: str) -> str:
        """Wait until the process prints a line that begins with one of the words; return the line.

        Returns "" if the output ended instead because the process exited.
        """
        for line in self._process.stdout or ():
            self._said.append(line)
            if line.startswith(words):
                return line.rstrip()
        self.running = False
        return ""

    def go(self) -> None:
        """Give the process its turn."""
        stdin = self._process.stdin
        if stdin is None:
            return
        try:
            stdin.write("go\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; `result` says why

    def result(self) -> dict[str, Any]:
        """Wait for the end of the process and return its results.

        Raises:
            typer.Exit: the process failed, or wrote nothing; its output has been shown.
        """
        self.until("\0")
        status = self._process.wait()
        if status or not self._result.is_file():
            self.give_up(f"exit status {status}")
        found: dict[str, Any] = json.loads(self._result.read_text(encoding="utf-8"))
        return found

    def give_up(self, why: str) -> NoReturn:
        """Show what the process printed, and exit."""
        sys.stderr.write("".join(self._said))
        output.note(f"error: {self.label} failed ({why}); its output is above")
        raise typer.Exit(FOUND)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._folder.cleanup()


def gather(script: Path, patched: Path, parts: Sequence[str], options: dict[str, int]) -> dict[str, Any]:
    """Run the parts, and return the results of each.

    Args:
        script: the training script, run unchanged.
        patched: the folder for the patched sources of the hooked training.
        parts: names of `demo.PARTS`.
        options: `steps` and `seed` of the training, `rounds` of the others.

    Raises:
        typer.Exit: one of the processes failed; its output has been shown.
    """
    # An outer `veomni-hook run` passes the hook on in these variables; the plain run must not see them.
    plain = {**os.environ, "HF_HUB_OFFLINE": "1", "VEOMNI_HOOK": "0"}
    probed = {**plain, "VEOMNI_HOOK": "1"}
    hooked = {**probed, "VEOMNI_DUMP_PATCHED": "1", "VEOMNI_DUMP_DIR": str(patched)}
    training = [str(script), "--by-turns", "--output", "OUTPUT"]
    training += [f"--{name}={options[name]}" for name in ("steps", "seed")]
    others = [part for part in parts if part != TRAINING]
    found: dict[str, Any] = {}
    with ExitStack() as stack, output.console(stderr=True).status("importing transformers") as status:
        workers = []
        if TRAINING in parts:
            for label, command, environment in (
                ("the training without the hook", [sys.executable], plain),
                ("the training with the hook", [sys.executable, "-m", "veomni_hook", "run"], hooked),
            ):
                workers.append(stack.enter_context(Worker([*command, *training], environment, label)))
        if others:
            cache = stack.enter_context(tempfile.TemporaryDirectory())
            command = [sys.executable, "-m", "veomni_hook.cli.demo.probe", "OUTPUT", cache]
            command += [str(options["rounds"]), *others]
            probe = stack.enter_context(Worker(command, probed, "the measurement"))
        # Imports (seconds, on one core) run in parallel, and finish before anything is timed.
        for worker in [*workers, probe] if others else workers:
            worker.until("ready")
        if workers:
            found["plain"], found["hooked"] = train_by_turns(workers, options["steps"], status.update)
        if others:
            probe.go()
            while line := probe.until("part "):
                status.update(f"measuring the part {line.removeprefix('part ')}")
            found |= probe.result()
    return found


def train_by_turns(
    workers: Sequence[Worker], steps: int, told: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Let the trainings, which are ready, take steps alternately; return what they recorded.

    Args:
        workers: the trainings.
        steps: the number of steps of each.
        told: called at every step with the progress.

    Raises:
        typer.Exit: a training failed; its output has been shown.
    """
    for step in range(steps):
        told(f"training alternately without and with the hook: step {step + 1} of {steps}")
        for worker in workers:
            worker.go()
            worker.until("ready")
        if not all(worker.running for worker in workers):
            break
    return [worker.result() for worker in workers]
