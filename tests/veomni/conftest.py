"""VeOmni's configs and modules are made for one release of transformers; elsewhere these tests skip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.veomni.sides import config_module

RELEASE = "5.9.0"
ROOT = Path(__file__).parents[2]


def missing() -> str:
    """What these tests need and do not find."""
    try:
        version("veomni")
    except PackageNotFoundError:
        return "veomni is not installed"
    found = version("transformers")
    return (
        "" if found == RELEASE else f"VeOmni's modules are generated from transformers {RELEASE}, not {found}"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items if reason else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


def in_process(
    cache: Path, script: str, *arguments: str, configs: list[tuple[str, str]], **settings: str
) -> Any:
    """Run a script of this folder with the hook and configs, and return the JSON of its last line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    environment |= {
        "VEOMNI_CACHE_DIR": str(cache),
        "VEOMNI_PATCHES": ",".join(config_module(*config) for config in configs),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {f"VEOMNI_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", f"tests.veomni.{script}", *arguments]
    done = subprocess.run(
        command, cwd=cache.parent, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
