"""Jobs of several processes on this machine (gloo), each started once for many cases."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Seconds for a whole job: the first one may have to patch modules that no cache holds yet.
LONGEST = 240
#: Seconds after which a process gives up a collective that another does not reach.
PATIENCE = 60


@cache
def once(script: str, *arguments: str, world: int) -> list[dict[str, Any]] | str:
    """Run a job, once for many tests; return what `job` returns, or the text of its error."""
    try:
        return job(script, *arguments, world=world)
    except JobError as error:
        return str(error)


class JobError(RuntimeError):
    """A process of a job failed, or the job took too long; the message holds what the processes wrote."""


def job(
    script: str, *arguments: str, world: int, longest: float = LONGEST, **environment: str
) -> list[dict[str, Any]]:
    """Run ``world`` processes of a script beside this file; return what each prints last, a line of JSON."""
    port = free_port()
    started = [
        start(script, *arguments, rank=rank, world=world, port=port, **environment) for rank in range(world)
    ]
    end = time.monotonic() + longest
    outputs, failed = [], ""
    try:
        for rank, process in enumerate(started):
            try:
                out, err = process.communicate(timeout=max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                failed += f"\nrank {rank} did not end within {longest} s"
            outputs.append(out)
            if process.returncode:
                failed += f"\nrank {rank} ended with {process.returncode}:\n{out}\n{err}"
    finally:
        for process in started:
            process.kill()
    if failed:
        raise JobError(failed)
    return [json.loads(out.splitlines()[-1]) for out in outputs]


def begin() -> None:
    """Join the job, in one of its processes."""
    from datetime import timedelta

    from torch import distributed

    distributed.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))


def start(
    script: str, *arguments: str, rank: int, world: int, port: int, **environment: str
) -> subprocess.Popen[str]:
    """Start one process of a job as torchrun would."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    variables |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VEOMNI_BANNER": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env=variables,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
