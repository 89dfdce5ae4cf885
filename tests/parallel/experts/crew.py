"""Processes of one gloo group that run one case after another: torch and transformers are imported once.

`Crew.run` sends a case's name to every rank and waits for all answers, 60 s at most. A case that fails on a rank may
leave others waiting for it, so the crew is replaced after a failure.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("worker.py")
STARTED, LIMIT = 150, 60
ANSWER = "answer: "


class Crew:
    """``size`` ranks; `run` starts them."""

    def __init__(self, size: int, folder: Path, **variables: str) -> None:
        self.size, self.folder, self._variables = size, folder, variables
        self._ranks: list[subprocess.Popen[str]] = []
        self._answers: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()

    def run(self, case: str, /, **arguments: Any) -> list[Any]:
        """Return what the case returned on each rank; an error of a rank is an AssertionError with its traceback."""
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.stdin.write(json.dumps({"case": case, "arguments": arguments}) + "\n")
            rank.stdin.flush()
        answers = self._collect(LIMIT, f"the case {case}")
        return [answers[rank]["returned"] for rank in range(self.size)]

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
            "VEOMNI_CACHE_DIR": str(self.folder / "cache"),
            "VEOMNI_BANNER": "0",
            "TRANSFORMERS_VERBOSITY": "error",
            **self._variables,
        }
        self._answers = queue.Queue()
        for number in range(self.size):
            rank = subprocess.Popen(
                [sys.executable, str(WORKER), str(self.folder)],
                env={**environment, "RANK": str(number), "LOCAL_RANK": str(number)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self.folder / f"rank{number}.log").open("w"),
                text=True,
            )
            self._ranks.append(rank)
            threading.Thread(target=self._listen, args=(number, rank, self._answers), daemon=True).start()
        self._collect(STARTED, "the start")

    @staticmethod
    def _listen(number: int, rank: subprocess.Popen[str], answers: queue.Queue[Any]) -> None:
        for line in rank.stdout:
            if line.startswith(ANSWER):  # scripts print, too
                answers.put((number, json.loads(line.removeprefix(ANSWER))))
        answers.put((number, {"failed": "the process ended"}))

    def _collect(self, seconds: float, what: str) -> dict[int, dict[str, Any]]:
        until, answers = time.monotonic() + seconds, dict[int, dict[str, Any]]()
        while len(answers) < self.size:
            try:
                number, answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.stop()
                raise AssertionError(
                    f"{what} took more than {seconds} s; answered: {sorted(answers)}\n{self._logs()}"
                ) from None
            if "failed" in answer:
                self.stop()
                raise AssertionError(f"{what} failed on rank {number}:\n{answer['failed']}\n{self._logs()}")
            answers[number] = answer
        return answers

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("rank*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)

    def stop(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        self._ranks = []
