"""Tests of other processes: their variables, what they print, two ranks of a group, and waiting for an event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
#: After how many seconds something hangs. No test may depend on what a machine does in less.
LIMIT = 600


def until(happened: Callable[[], object]) -> None:
    """Wait for an event."""
    end = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < end, f"it did not happen in {LIMIT} s"
        time.sleep(0.01)


def environment(cache: Path | None = None, **variables: str) -> dict[str, str]:
    """This process's variables without the hook's: the repository can be imported, no hub, one thread."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    if cache is not None:
        kept["VEOMNI_CACHE_DIR"] = str(cache)
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables


def started(
    *command: object, cache: Path | None = None, cwd: Path = ROOT, **variables: str
) -> subprocess.Popen[str]:
    """Python with these arguments, in the `environment`."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env=environment(cache, **variables), cwd=cwd,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def outputs(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process that must end well has printed, and its errors."""
    out, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors[-4000:] or out[-4000:]
    return out, errors


def facts(process: subprocess.Popen[str]) -> Any:
    """What a process has printed last, as JSON."""
    return json.loads(outputs(process)[0].splitlines()[-1])


def two_ranks(script: Path, folder: Path, variables: Mapping[str, str] | None = None) -> list[str]:
    """Run a script, which calls `join` and `leave`, as both ranks of a group; return what each printed.

    Args:
        script: gets ``folder`` as its argument.
        folder: where the ranks meet: at a file, because a free port may be taken before they listen on it.
        variables: what the environment has beside this process's.
    """
    shared = {"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    variables = {**environment(PYTHONPATH=path), **shared, **(variables or {})}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, printed, strict=True):
        assert rank.returncode == 0, output
    return printed


def join() -> Path:
    """Join the group that `two_ranks` has started; return the folder in which the ranks meet."""
    import torch.distributed as dist

    folder = Path(sys.argv[1])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=LIMIT),
    )
    return folder


def leave() -> NoReturn:
    """End this rank with status 0 when all ranks have come here, without what Python does at exit.

    Models and device meshes hold the group, so gloo's threads outlive `destroy_process_group`. One that
    releases a tensor while the interpreter ends terminates the process.
    """
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
