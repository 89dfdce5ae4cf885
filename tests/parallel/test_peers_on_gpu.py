"""Exchanges through the memory of two GPUs are those of NCCL, bit for bit."""

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_heads_gathers_and_gradients():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    case = ["-m", "tests.parallel.facts_of_peers_on_gpu"]
    done = subprocess.run(
        [sys.executable, *command, *case], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("the same") == 2
