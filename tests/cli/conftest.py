"""The real command in a subprocess, as a shell would start it, with settings of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all command line tests: what one has patched, the next one finds."""
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    return folder


@pytest.fixture(scope="session")
def environ(cache_dir: Path) -> dict[str, str]:
    """The environment without anyone's settings or terminal."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VEOMNI_", "_TYPER", "PYTEST")) and name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    }
    return {
        **kept,
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VEOMNI_CACHE_DIR": str(cache_dir),
        "TERM": "xterm-256color",
    }


@pytest.fixture
def veomni(environ: dict[str, str], tmp_path: Path) -> Command:
    """Run `veomni-hook` with arguments in an empty folder; returns the finished process."""

    def run(*arguments: str, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "veomni_hook", *arguments],
            env={**environ, **(env or {})},
            **{"cwd": tmp_path, "capture_output": True, "encoding": "utf-8", "timeout": 120, **options},  # type: ignore[call-overload]
        )

    return run
