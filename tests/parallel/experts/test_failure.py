"""A rank that fails in its experts, under torchrun."""

from pathlib import Path

import pytest

from tests.processes import LIMIT, started

SCRIPT = Path(__file__).with_name("failing.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"), [("raises", "ZeroDivisionError: these experts fail"), ("killed", "Signal 9 (SIGKILL)")]
)
def test_a_failing_rank_ends_the_job_and_says_why(tmp_path, how, said):
    command = *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"), SCRIPT, how
    job = started(*command, cache=tmp_path, CUDA_VISIBLE_DEVICES="")
    _, errors = job.communicate(timeout=LIMIT)  # a third of what the other rank would wait
    assert job.returncode != 0 and said in errors
