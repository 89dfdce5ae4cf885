"""Trainer with an unchanged script: two processes that share sequences log what one process logs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.parallel.job import JobError, job, once
from veomni_hook.errors import ParallelError
from veomni_hook.parallel import data, process


def test_trainer_logs_what_one_process_logs() -> None:
    one = once("facts_of_trainer.py", world=1)
    assert not isinstance(one, str), one
    two = job("facts_of_trainer.py", world=2, VEOMNI_PARALLEL="sp=2")
    for told in two:
        assert told["losses"] == pytest.approx(one[0]["losses"], rel=1e-4)
        assert told["norms"] == pytest.approx(one[0]["norms"], rel=1e-4)
        assert told["evaluated"] == pytest.approx(one[0]["evaluated"], rel=1e-4)
        assert told["predictions"] == one[0]["predictions"] == [6, 16, 48]


def test_a_world_that_cannot_be_divided_stops_before_the_first_step() -> None:
    with pytest.raises(JobError, match="sp=3 does not divide the 2 processes"):
        job("facts_of_trainer.py", world=2, VEOMNI_PARALLEL="sp=3")


def accelerator(rank: int, world: int, mesh: Any = None) -> Any:
    return SimpleNamespace(num_processes=world, process_index=rank, state=SimpleNamespace(device_mesh=mesh))


def test_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_told", None)
    process.tell("sp=2")
    assert [(data.index(accelerator(r, 4)), data.count(accelerator(r, 4))) for r in range(4)] == [
        (0, 2), (0, 2), (1, 2), (1, 2),
    ]  # fmt: skip
    with pytest.raises(ParallelError, match="ParallelismConfig of its own"):
        data.count(accelerator(0, 4, mesh=object()))
    evaluating = SimpleNamespace(prepare=lambda _: data.count(accelerator(1, 4)))
    assert data.prepared(evaluating, None, False) == 4
    assert data.prepared(evaluating, None, True) == 2
