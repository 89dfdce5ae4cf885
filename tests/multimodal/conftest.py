from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Facts = Callable[..., str]


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Runs a module of facts in a process of its own, with the hook or without, and returns what it prints."""
    cache = tmp_path_factory.mktemp("cache")

    def run(module: str, *arguments: str, hook: bool) -> str:
        environment = {
            **os.environ, "FACTS_HOOK": str(int(hook)), "VEOMNI_CACHE_DIR": str(cache), "VEOMNI_BANNER": "0",
            "OMP_NUM_THREADS": "1", "VEOMNI_STRICT": "1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", f"tests.multimodal.{module}", *arguments],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run
