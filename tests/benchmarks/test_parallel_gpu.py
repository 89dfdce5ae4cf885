"""`parallel_gpu`: a process that fails ends the job, and its traceback is told."""

import pytest

from benchmarks.parallel_gpu import hang

ERROR = "ZeroDivisionError: rank 1 fails in a layer"


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["sp=2", "ep=2"])
@pytest.mark.parametrize(("how", "status", "said"), [("raise", 1, ERROR), ("kill", -9, None)])
def test_a_process_that_fails_in_a_layer_ends_the_job(monkeypatch, setting, how, status, said):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    row = hang(setting, how, "cpu")
    assert (row["status"], row["first"]) == (1, f"rank 1, exit status {status}")
    assert row["seconds"] < 60 and row.get("rank 1") == said
