"""A rank that fails in its experts, under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import LIMIT, ROOT

SCRIPT = Path(__file__).with_name("failing.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"), [("raises", "ZeroDivisionError: these experts fail"), ("killed", "Signal 9 (SIGKILL)")]
)
def test_a_failing_rank_ends_the_job_and_says_why(tmp_path, how, said):
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
        timeout=LIMIT,  # a third of what the other rank would wait
    )
    assert job.returncode != 0
    assert said in job.stderr
