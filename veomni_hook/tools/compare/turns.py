"""Runs of one command alternately without and with the hook: off, on, off, on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from veomni_hook.finders.children import environment
from veomni_hook.tools.compare import process
from veomni_hook.tools.compare.plan import BOOTSTRAP, Plan
from veomni_hook.tools.compare.runs import Run, progress, read, written

if TYPE_CHECKING:
    from veomni_hook.settings import Settings

__all__ = ["Order", "environ_of", "take_turns"]

#: In the command's arguments, the name of the run replaces this: `without-1`, `with-1`, ...
PLACE = "{run}"
LINES = 15


@dataclass(frozen=True)
class Order:
    """What to run.

    Attributes:
        command: the program and its arguments; `{run}` in an argument is replaced by the run's name.
        settings: the settings of the hook, for the runs with it.
        steps: the number of optimizer steps of each run.
        rounds: the number of runs of each kind.
        cwd: the command's working directory; None: the current one.
        limit: the seconds after which a run is stopped; None: no limit.
        verbose: whether to show what the script prints.
    """

    command: Sequence[str]
    settings: Settings
    steps: int
    rounds: int
    cwd: Path | None = None
    limit: float | None = None
    verbose: bool = False


def take_turns(order: Order, told: Callable[[Run, int], None]) -> Iterator[Run]:
    """Run the command alternately without and with the hook; yield each run when it has ended.

    A round is always completed, so that there are runs of both kinds. After a failure no other round starts.

    Args:
        order: what to run.
        told: called several times per second with the current run and the number of its steps.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; every process has ended.
    """
    for turn in range(1, order.rounds + 1):
        failed = False
        for hooked in (False, True):
            run = _once(order, Run(hooked, turn), told)
            failed = failed or run.failed
            yield run
        if failed:
            return


def environ_of(plan: Plan, settings: Settings, *, hooked: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run; the two kinds differ only in whether the hook is on."""
    path = os.pathsep.join(filter(None, (BOOTSTRAP, environ.get("PYTHONPATH"))))
    base = {**environ, **plan.variables(), "PYTHONPATH": path}
    return {**base, **environment(replace(settings, enabled=hooked), base)}


def _once(order: Order, run: Run, told: Callable[[Run, int], None]) -> Run:
    name = f"{'with' if run.hooked else 'without'}-{run.turn}"
    command = [word.replace(PLACE, name) for word in order.command]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="veomni-compare-")))
        log = folder / "log"
        output = None if order.verbose else stack.enter_context(open(log, "wb"))

        def watch() -> bool:
            told(run, progress(folder))
            return written(folder)

        plan = Plan(str(folder), order.steps, time.time())
        environ = environ_of(plan, order.settings, hooked=run.hooked, environ=os.environ)
        ended = process.run(command, environ, cwd=order.cwd, output=output, watch=watch, limit=order.limit)
        run.status, run.ended_by_us = ended.status, ended.ended_by_us
        run.said = process.tail(log, LINES) if output is not None else []
        return read(run, folder)
