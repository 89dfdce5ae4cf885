"""The real command in a subprocess, as a shell would start it, with settings of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
DATA = REPOSITORY / "tests" / "data"
TINY = "transformers.models.tiny.modeling_tiny"


@dataclass
class Done:
    """One finished command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)


Command = Callable[..., Done]


def starter(environ: dict[str, str], folder: Path) -> Command:
    """Return a function that runs `veomni-hook` there; keywords set (or, with None, unset) variables."""

    def run(
        *arguments: str, flags: tuple[str, ...] = (), cwd: Path = folder, **variables: str | None
    ) -> Done:
        changed = {**environ, **variables}
        done = subprocess.run(
            [sys.executable, *flags, "-m", "veomni_hook", *arguments],
            env={name: value for name, value in changed.items() if value is not None},
            cwd=cwd,
            capture_output=True,
            encoding="utf-8",
            timeout=600,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the tests that do not look into it: what one has patched, the next one finds."""
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    return folder


@pytest.fixture(autouse=True)
def alone(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test prints in its own process is as wide as in a pipe, and what it keeps is nobody's."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("VEOMNI_CACHE_DIR", str(cache_dir))


@pytest.fixture(scope="session")
def environ(cache_dir: Path) -> dict[str, str]:
    """The environment without anyone's settings or terminal; transformers is the installed one."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "GITHUB_ACTIONS", "PYTHONUNBUFFERED")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VEOMNI_", "_TYPER", "PYTEST", "COV_")) and name not in dropped
    }
    return {
        **kept, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1",
        "VEOMNI_CACHE_DIR": str(cache_dir), "VEOMNI_BANNER": "0", "TERM": "xterm-256color",
    }  # fmt: skip


@pytest.fixture(scope="session")
def tiny_environ(environ: dict[str, str]) -> dict[str, str]:
    """The same with the stand-in for transformers in tests/data/hub, and a config that patches it."""
    path = (DATA / "hub", DATA / "configs", REPOSITORY)
    return {**environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "VEOMNI_PATCHES": "tiny_config"}


@pytest.fixture
def veomni(environ: dict[str, str], tmp_path: Path) -> Command:
    """Run `veomni-hook` against the installed transformers."""
    return starter(environ, tmp_path)


@pytest.fixture
def tiny(tiny_environ: dict[str, str], tmp_path: Path) -> Command:
    """Run `veomni-hook` against the stand-in for transformers."""
    return starter(tiny_environ, tmp_path)
