"""`batch_invariance_gpu`: its sides train the same model, and one that cannot run says why."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import batch_invariance_gpu, families_gpu
from tests.benchmarks.test_families_gpu import SMALL


@pytest.mark.slow
def test_sides_train_the_same_model(monkeypatch):
    monkeypatch.setattr(families_gpu, "STEPS", 2)
    processes = batch_invariance_gpu.processes_for("cpu")
    trained = batch_invariance_gpu.PROCESSES
    sides = [side for own in trained.values() for side in own]
    facts = families_gpu.measured(SMALL, processes, sides, trained=trained, rounds=1)
    for process in processes.values():
        process.end()
    assert list(facts) == ["eager", "eager+published", "ours", "ours+invariant"]
    # It is made for a GPU, and not installed here.
    assert "batch_invariant_ops" in facts["eager+published"]["error"]
    for side in ("ours", "ours+invariant"):
        assert facts[side]["loss"] == pytest.approx(facts["eager"]["loss"], rel=1e-2)
        assert facts[side]["step_ms"] > 0
