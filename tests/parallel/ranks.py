"""Ranks of gloo groups on this machine: one server imports everything once and forks the ranks of each case.

A rank that lives for one case alone costs no imports and leaves no threads behind. (With one set of processes for
all cases, hundreds of gloo's threads polled for ever and took both cores of a small machine.) One case at a time
runs on a machine, whichever worker of pytest asks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import environment
from veomni_hook.patches import expert_release

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("rank_server.py")
#: What needs experts that processes divide.
DIVIDED = pytest.mark.skipif(
    not expert_release.divides_experts(), reason=f"needs transformers {expert_release.LEAST}"
)
#: The modeling modules that cases use: patched before, not while sizes are told.
FAMILIES = (
    "llama", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "mistral", "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "mamba2", "longcat_flash",
    "deepseek_v32", "deepseek_v4", "glm5_next", "glm_moe_dsa", "axk2", "dots3_note", "hy_v4",
    "gpt2", "llama4", "bert", "t5", "dbrx", "jetmoe", "nllb_moe", "switch_transformers",
    "qwen2_5_vl", "qwen3_vl", "qwen3_omni_moe",
)  # fmt: skip
#: Seconds: for the server's imports, which may patch modules first, and for a case.
STARTED, LIMIT = 180, 60


class Ranks:
    """Starts the server with the first case. ``folder`` is for its files, ``lock`` is shared by all workers."""

    def __init__(self, folder: Path, lock: Path) -> None:
        self.folder, self._lock = folder, lock
        self._server: subprocess.Popen[str] | None = None
        self._known: dict[str, list[Any]] = {}

    def run(
        self,
        case: str,
        size: int,
        setting: str = "",
        /,
        *,
        joined: bool = True,
        limit: int = LIMIT,
        **arguments: Any,
    ) -> list[Any]:
        """Return what the case, ``module:function`` beside this file, returned on each rank.

        ``setting`` is that of `VEOMNI_PARALLEL`. A rank that fails, or is not done after ``limit`` seconds, is an
        AssertionError with the tracebacks of all.
        """
        order = {"case": case, "size": size, "setting": setting, "joined": joined, "arguments": arguments}
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._server is None:
                self._start()
            answer = self._ask({**order, "limit": limit}, limit + 10)
        if "failed" in answer:
            raise AssertionError(f"{case}: {answer['failed']}\n{self._logs()}")
        return answer["returned"]

    def once(self, case: str, size: int, setting: str = "", /, **options: Any) -> list[Any]:
        """`run`, for several tests that read one result."""
        key = json.dumps([case, size, setting, options])
        if key not in self._known:
            self._known[key] = self.run(case, size, setting, **options)
        return self._known[key]

    def _start(self) -> None:
        quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "VEOMNI_BANNER": "0"}
        # So that modules are patched for both; each case tells its own.
        sizes = {"VEOMNI_PARALLEL": "sp=2,ep=2"}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._server = subprocess.Popen(
            [sys.executable, str(SERVER), str(self.folder)],
            env=environment(CUDA_VISIBLE_DEVICES="", **quiet, **sizes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "server.log").open("w"),
            text=True,
            start_new_session=True,
        )
        if "failed" in (answer := self._ask(None, STARTED)):
            raise AssertionError(f"the server of ranks: {answer['failed']}\n{self._logs()}")

    def _ask(self, order: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        server = self._server
        if order is not None:
            server.stdin.write(json.dumps(order) + "\n")
            server.stdin.flush()
        if not select.select([server.stdout], [], [], seconds)[0]:
            self.stop()
            return {"failed": f"no answer after {seconds} s"}
        line = server.stdout.readline()
        if not line:
            self.stop()
            return {"failed": "the server ended"}
        return json.loads(line)

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)

    def stop(self) -> None:
        """End the server and its ranks."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and nobody of its group is left
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._server = None
