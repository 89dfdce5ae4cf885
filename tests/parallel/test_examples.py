"""The example trains under torchrun, and two processes that share sequences get the losses of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.ranks import ROOT

SCRIPT = ROOT / "examples" / "parallel" / "plain_loop.py"


def losses(folder: Path, processes: int, sizes: str) -> list[float]:
    output = folder / "losses.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--nproc_per_node", str(processes)),
            *("--standalone", str(SCRIPT), "--steps", "3", "--output", str(output)),
        ],
        env={
            **environment,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VEOMNI_BANNER": "0",
            "VEOMNI_PARALLEL": sizes,
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


def test_two_processes_share_sequences(tmp_path: Path) -> None:
    assert losses(tmp_path, 2, "sp=2") == pytest.approx(losses(tmp_path, 1, ""), rel=1e-5)


def test_that_test_can_fail(tmp_path: Path) -> None:
    """Without sp, two processes read other batches."""
    assert losses(tmp_path, 2, "") != pytest.approx(losses(tmp_path, 1, ""), rel=1e-5)
