"""Apply one function to the text of many modules on several processors, for `list` and the lock."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from veomni_hook.errors import VeomniHookError
from veomni_hook.layout import counted
from veomni_hook.tools.cli import output
from veomni_hook.tools.cli.inputs.sources import read_source

T = TypeVar("T")
Work = Callable[[str, str], T]

FEW = 16  # this many modules are done before other processes have started
CHUNK = 4
MOST_JOBS = 8


def survey(
    work: Work[T], files: Mapping[str, str], label: str, *, jobs: int | None = None
) -> list[T | VeomniHookError]:
    """Return ``work(module, text)`` for each file, in their order; an error for a file that cannot be read.

    Args:
        work: a function of a module that worker processes can import, or a `functools.partial` of one.
        files: module names with their files.
        label: the label of the progress bar.
        jobs: number of processes; by default one for each processor.

    Raises:
        VeomniHookError: a worker process was killed.
    """
    may_use = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = min(jobs or may_use or 1, MOST_JOBS)
    names = list(files)
    one = partial(_on_file, work)
    if jobs == 1 or len(names) <= FEW:
        return [one((name, files[name])) for name in output.track(names, label)]
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # spawn: a fork would copy the caller's libraries and their threads in an undefined state.
    # Few trees are alive at a time, so garbage collection frees nothing, but it walks all of them.
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=gc.disable) as pool:
        results = pool.map(one, files.items(), chunksize=CHUNK)
        try:
            return [next(results) for _ in output.track(names, label)]
        except BrokenProcessPool as error:
            raise VeomniHookError(
                "a worker process ended before its work was done",
                where=f"{counted(jobs, 'process', 'processes')} over {counted(len(names), 'module')}",
                fix="it may have run out of memory; use --jobs 1",
            ) from error


def _on_file(work: Work[T], file: tuple[str, str]) -> T | VeomniHookError:
    module, path = file
    try:
        text = read_source(path)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return VeomniHookError(
            f"the source of {module} cannot be read: {error}",
            where=path,
            fix="make it readable, or leave it out",
        )
    return work(module, text)
