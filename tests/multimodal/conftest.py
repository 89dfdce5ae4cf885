from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.once import shared_folder
from tests.processes import environment

ROOT = Path(__file__).parents[2]
#: Seconds for one process.
LIMIT = 300
Facts = Callable[..., str]


def _environment(cache: Path, changes: dict[str, str]) -> dict[str, str]:
    # Asking for a GPU in the server must not start CUDA, which would not survive a fork.
    return environment(cache, VEOMNI_BANNER="0", PYTORCH_NVML_BASED_CUDA_CHECK="1") | changes


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Patched modules, for every process of these tests."""
    return shared_folder(tmp_path_factory) / "multimodal_cache"


@pytest.fixture(scope="session")
def facts(tmp_path_factory, cache):
    """Runs a module of facts in a process of its own, with these variables, and returns what it prints."""
    folder = tmp_path_factory.mktemp("facts")
    servers: list[subprocess.Popen[str]] = []

    def stop() -> None:
        for server in servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
            server.communicate()
        servers.clear()

    def run(module: str, *arguments: str, **changes: str) -> str:
        if not servers:
            servers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.multimodal.process_server"],
                    cwd=ROOT,
                    env=_environment(cache, {}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        order = {
            "module": f"tests.multimodal.{module}", "arguments": arguments, "environment": _environment(cache, changes),
            "log": str(folder / module),
        }  # fmt: skip
        server = servers[0]
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(order), file=server.stdin, flush=True)
        answered, _, _ = select.select([server.stdout], [], [], LIMIT)
        status = server.stdout.readline().strip() if answered else f"none after {LIMIT} s"
        if status != "0":
            stop()
            log = folder / f"{module}.err"
            raise AssertionError(
                f"{module}: status {status}\n{log.read_text()[-3000:] if log.exists() else ''}"
            )
        return (folder / f"{module}.out").read_text()

    yield run
    stop()


@pytest.fixture(scope="session")
def facts_on_gpu(cache):
    """`facts` in a process that is started, not forked, for CUDA."""

    def run(module: str, *arguments: str, **changes: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", f"tests.multimodal.{module}", *arguments],
            cwd=ROOT, env=_environment(cache, changes), capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
