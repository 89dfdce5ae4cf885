"""`memory_prediction_gpu`: what it records of a small set-up on a CPU."""

import json

import pytest

from tests.processes import outputs, started

#: In a process of its own: the benchmark switches the hook on.
SCRIPT = """
import sys
from benchmarks import memory_prediction_gpu as benchmark

right = benchmark.Setup("small", 32, optimizer={}, checkpoint=True)
wrong = benchmark.Setup("small", 32, adapters={"target_modules": ["absent"]})
benchmark.SETUPS = wrong, right
benchmark.main(["--device", "cpu", "--out", sys.argv[1]])
"""


@pytest.mark.slow
def test_a_setup_that_fails_is_reported_and_the_others_go_on(tmp_path):
    printed, _ = outputs(started("-c", SCRIPT, tmp_path / "out.json", cache=tmp_path / "cache"))
    rows = json.loads((tmp_path / "out.json").read_text())["setups"]
    assert "absent" in rows[0]["error"]
    assert rows[1]["parts"]["weights"] < rows[1]["predicted"]
    assert "small, 1 x 32, checkpoints, AdamW" in printed
