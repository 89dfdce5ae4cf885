"""The two processes of the demo, without and with the hook, which take steps alternately.

While one of them takes a measured step, the other waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import typer

from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.demo.shapes import Measured
from veomni_hook.tools.cli.usage import FOUND

__all__ = ["Worker", "by_turns", "gather"]


class Worker(AbstractContextManager["Worker"]):
    """A process that runs in turns with others.

    Args:
        command: the command to run; OUTPUT in it is replaced with the JSON file that the process must write.
        environment: its complete environment.
        label: its name in errors: `the training with the hook`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], label: str) -> None:
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

    def until_ready(self) -> None:
        """Wait until the process prints `ready`, or has ended: then ``running`` is false."""
        for line in self._process.stdout or ():
            self._said.append(line)
            if line == "ready\n":
                return
        self.running = False

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

    def result(self) -> Measured:
        """Let the process go on to its end, and return its results.

        Raises:
            typer.Exit: the process failed, or wrote nothing; its output has been shown.
        """
        while self.running:
            self.go()
            self.until_ready()
        status = self._process.wait()
        if status or not self._result.is_file():
            self.give_up(f"exit status {status}")
        results: Measured = json.loads(self._result.read_text(encoding="utf-8"))
        return results

    def give_up(self, why: str) -> NoReturn:
        """Show what the process printed, and exit."""
        sys.stderr.write("".join(self._said))
        output.note(f"error: {self.label} failed ({why}); its output is above")
        raise typer.Exit(FOUND)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._folder.cleanup()


def gather(script: Path, model: Path, parts: Mapping[str, str], steps: int) -> list[Measured]:
    """Run the script without and with the hook, and return what `veomni_hook.tools.cli.demo.worker` found.

    Args:
        script: the training script.
        model: the folder of the model.
        parts: the title of each way of training.
        steps: the number of steps of each.

    Raises:
        typer.Exit: a process failed; its output has been shown.
    """
    # OpenMP's threads wait without spinning, or those of the process that waits would take the other's cores.
    base = {"OMP_WAIT_POLICY": "passive", **os.environ, "HF_HUB_OFFLINE": "1", "VEOMNI_BANNER": "0"}
    command = [sys.executable, "-m", "veomni_hook.tools.cli.demo.worker", "OUTPUT", str(script), str(model)]
    command += [str(steps), *parts]
    with ExitStack() as stack:
        told = stack.enter_context(progress())
        workers = [
            stack.enter_context(
                Worker(command, {**base, "VEOMNI_HOOK": switch}, f"the training {side} the hook")
            )
            for side, switch in (("without", "0"), ("with", "1"))
        ]
        return by_turns(workers, list(parts.values()), steps, told)


def by_turns(
    workers: Sequence[Worker], titles: Sequence[str], steps: int, told: Callable[[str], None]
) -> list[Measured]:
    """Let the trainings take steps alternately; return what they recorded.

    The first step of each part, with the imports and the loading before it, is one that all take at once.

    Args:
        workers: the trainings, just started.
        titles: the names of the parts.
        steps: the number of steps of each part.
        told: called at every step with the progress.

    Raises:
        typer.Exit: a training failed; its output has been shown.
    """
    for number, title in enumerate(titles):
        told(f"{title}: loading, and step 1 of {steps}")
        for worker in workers:
            if number:
                worker.go()
        for worker in workers:
            worker.until_ready()
        for step in range(2, steps + 1):
            if not all(worker.running for worker in workers):
                break
            told(f"{title}: step {step} of {steps}")
            for worker in workers:
                worker.go()
                worker.until_ready()
    return [worker.result() for worker in workers]


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show one changing line on a terminal; elsewhere write each as a line, so that a log is alive."""
    terminal = output.console(stderr=True)
    if terminal.is_terminal:
        with terminal.status("") as status:
            yield status.update
    else:
        yield output.note
