"""A rank that fails in its experts, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("failing.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"), [("raises", "ZeroDivisionError: these experts fail"), ("killed", "Signal 9 (SIGKILL)")]
)
def test_a_failing_rank_ends_the_job_and_says_why(tmp_path, how, said):
    started = time.monotonic()
    job = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            str(SCRIPT),
            how,
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
            "VEOMNI_CACHE_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert job.returncode != 0
    assert said in job.stderr
    # Most of this is the start of the processes.
    assert time.monotonic() - started < 120
