"""Sequence parallelism in the batch-invariant mode: two processes compute the bits of one."""

from pathlib import Path

import pytest
import torch

from tests.processes import outputs, started


def log_probs(processes, saved):
    launch = "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"
    script = Path(__file__).with_name("shared.py")
    _, errors = outputs(started(*launch, script, saved, VEOMNI_PARALLEL=f"sp={processes}"))
    assert "not batch-invariant" not in errors
    return torch.load(saved)


@pytest.mark.slow
def test_two_processes_compute_the_bits_of_one(tmp_path):
    one, two = (log_probs(processes, tmp_path / f"{processes}.pt") for processes in (1, 2))
    assert torch.equal(one, two)
