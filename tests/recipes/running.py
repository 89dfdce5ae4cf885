"""Starting recipes, and reading what came of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.recipes.drive import AS_SET, RECIPES

ROOT = RECIPES.parents[1]
DRIVE = ("-m", "tests.recipes.drive")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
LINE = re.compile(r"^  \w+ x\d+: (\w+)/\w+: (.*)$", re.MULTILINE)


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """The environment of a script that runs in a folder: no settings but these, a cache of its own, no hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    return {
        **kept, "PYTHONPATH": str(ROOT), "VEOMNI_CACHE_DIR": str(folder / "cache"), "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **variables,
    }  # fmt: skip


def run(command: list[str], folder: Path, limit: int, variables: dict[str, str]) -> str:
    """Run a command in a folder and return what it printed; after ``limit`` seconds end all that it started."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
            errors = f"ended after {limit} s\n{errors}"
    assert process.returncode == 0, f"{out[-2000:]}\n{errors[-6000:]}"
    return out


def drive(
    folder: Path,
    model: Path,
    *recipes: str,
    choices: str = AS_SET,
    launcher: tuple[str, ...] = (),
    limit: int = 300,
    **variables: str,
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Run recipes in one process, or under a launcher in two; return by recipe and choice what came of them."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "results.json"
    run(
        [sys.executable, *launcher, *DRIVE, str(out), str(model), choices, *recipes],
        folder,
        limit,
        environment(folder, **variables),
    )
    found: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def said_of(explanation: str) -> dict[str, list[str]]:
    """What `explain` printed of each op."""
    found: dict[str, list[str]] = {}
    for op, said in LINE.findall(explanation):
        found.setdefault(op, []).append(said)
    return found
