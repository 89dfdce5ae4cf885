"""Tests of several processes: two ranks of a group, their end, and waiting for what another process does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
#: After how many seconds something hangs. No test may depend on what a machine does in less.
LIMIT = 600


def until(happened: Callable[[], object]) -> None:
    """Wait for an event."""
    end = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < end, f"it did not happen in {LIMIT} s"
        time.sleep(0.01)


def two_ranks(script: Path, folder: Path, variables: Mapping[str, str] | None = None) -> list[str]:
    """Run a script, which calls `join` and `leave`, as both ranks of a group; return what each printed.

    Args:
        script: gets ``folder`` as its argument.
        folder: where the ranks meet: at a file, because a free port may be taken before they listen on it.
        variables: what the environment has beside this process's.
    """
    shared = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    environment |= {**shared, "PYTHONPATH": path, **(variables or {})}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
    return outputs


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
