"""Exchanges through the memory of two GPUs are those of NCCL, bit for bit."""

import pytest
import torch

from tests.processes import outputs, started

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_heads_gathers_and_gradients():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    case = ["-m", "tests.parallel.facts_of_peers_on_gpu"]
    printed, _ = outputs(started(*command, *case))
    assert printed.count("the same") == 2
