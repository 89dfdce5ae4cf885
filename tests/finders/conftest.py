"""Every test imports for real, in a fresh interpreter, against the stand-in package in tests/data/hub."""

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

from tests import processes

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
TINY = "transformers.models.tiny.modeling_tiny"
HOOK = "import veomni_hook.install\n"
#: Prints what a class of the stand-in computes: 3, and patched by tiny_config 103.
SHOW = f"from {TINY} import TinyNorm; print(TinyNorm().forward(1))"
#: For tests that write modules into the working directory.
HERE = "import sys; sys.path.insert(0, '.')\n"


def config_of(body: str = "", module: str = TINY) -> str:
    """The text of a config module; ``body`` makes patches."""
    return f"from veomni_hook import PatchConfig\nconfig = PatchConfig({module!r})\n{body}\n"


def warnings_of(err: str) -> list[str]:
    """The lines of warnings in an error output."""
    return [line for line in err.splitlines() if "Warning: " in line]


@dataclass
class Ran:
    """One finished interpreter."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> Any:
        """The last line of standard output, as JSON."""
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])


Python = Callable[..., Ran]


def calls_of(call: Callable[[], object]) -> int:
    """How many Python functions a call runs, once everything is known that is looked up once."""
    call()
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(names) - 1  # the call itself


@pytest.fixture
def python(tmp_path):
    """Run code in a fresh interpreter; keyword arguments set or (None) unset environment variables."""

    def run(code: str, *arguments: str, flags: tuple[str, ...] = (), **environment: str | None) -> Ran:
        variables = processes.environment(
            tmp_path / "cache", PYTHONPATH=os.pathsep.join(map(str, (DATA / "hub", DATA / "configs", ROOT))),
            VEOMNI_PATCHES="tiny_config", VEOMNI_BANNER="0", PYTHONDONTWRITEBYTECODE="1",
        )  # fmt: skip
        for name, value in environment.items():
            variables.pop(name, None)
            if value is not None:
                variables[name] = value
        done = subprocess.run(
            [sys.executable, *flags, "-c", code, *arguments], env=variables, cwd=tmp_path,
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr)

    return run
