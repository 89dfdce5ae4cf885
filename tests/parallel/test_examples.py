"""The examples train, and processes that share sequences or experts get the losses of one."""

import json
import socket

import pytest

from tests.parallel.ranks import DIVIDED, ROOT
from tests.processes import outputs, started

SEQUENCES = ["plain_loop.py", "trainer.py", "accelerate_loop.py"]


def losses(ranks, folder, script, size, setting):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"script": script, "port": port, "folder": str(folder)}
    found = ranks.run("example_cases:losses", size, setting, joined=False, **given)
    assert len(found[0]) == 3
    return found[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("script", SEQUENCES)
def test_two_processes_share_sequences(ranks, tmp_path, script):
    together = losses(ranks, tmp_path, script, 2, "sp=2")
    assert together == pytest.approx(losses(ranks, tmp_path, script, 1, ""), rel=1e-4)


@DIVIDED
def test_two_processes_share_experts(ranks, tmp_path):
    together = losses(ranks, tmp_path, "experts.py", 2, "ep=2")
    assert together == pytest.approx(losses(ranks, tmp_path, "experts.py", 1, ""), rel=1e-4)


def test_those_tests_can_fail(ranks, tmp_path):
    """Without sp, two processes read other batches."""
    apart = losses(ranks, tmp_path, "plain_loop.py", 2, "")
    assert apart != pytest.approx(losses(ranks, tmp_path, "plain_loop.py", 1, ""), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "setting"), [(SEQUENCES[0], "sp=2"), pytest.param("experts.py", "ep=2", marks=DIVIDED)]
)
def test_under_torchrun(tmp_path, script, setting):
    output = tmp_path / "losses.json"
    path = ROOT / "examples" / "parallel" / script
    launched = *("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"), path
    outputs(started(*launched, "--steps", "3", "--output", output, cwd=tmp_path, VEOMNI_PARALLEL=setting))
    assert len(json.loads(output.read_text())) == 3
