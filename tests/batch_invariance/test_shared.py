"""Sequence parallelism in the batch-invariant mode: two processes compute the bits of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def log_probs(processes, saved):
    script = Path(__file__).with_name("shared.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        script,
    ]
    done = subprocess.run(
        [*command, saved],
        capture_output=True, text=True, timeout=600, check=False,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1",
            "VEOMNI_PARALLEL": f"sp={processes}",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "not batch-invariant" not in done.stderr
    return torch.load(saved)


@pytest.mark.slow
def test_two_processes_compute_the_bits_of_one(tmp_path):
    one, two = (log_probs(processes, tmp_path / f"{processes}.pt") for processes in (1, 2))
    assert torch.equal(one, two)
