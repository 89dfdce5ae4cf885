from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from veomni_hook.bench import record, run
from veomni_hook.bench.problem import Problem
from veomni_hook.bench.problems import OPS, checked, problems
from veomni_hook.bench.run import Row, measured
from veomni_hook.bench.timing import peak_bytes
from veomni_hook.errors import KernelError
from veomni_hook.kernels.registry import registry


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round, and limits that need no measurement."""
    monkeypatch.setitem(run.ROUNDS, "cpu", 1)
    monkeypatch.setattr(run, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(run, "matmul_rate", lambda device, dtype: 1e9)
    monkeypatch.setattr(record, "bandwidth", lambda device: 1e9)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not\nhere")


def elementwise() -> Problem:
    x = torch.randn(64, 8)
    return Problem(
        op="double",
        shape="64 x 8",
        leaves=[x],
        sides={"eager": double, "peer": fail, "ours": double},
        limit="bytes",
        work={"forward": 2 * x.nbytes, "backward": 2 * x.nbytes, "turned": 2 * x.nbytes},
        incoming={"backward": [torch.ones_like(x)], "turned": [torch.ones(8, 64).t()]},
        spoils=frozenset({"ours"}),
    )


def test_every_part_of_every_side_and_why_one_is_missing() -> None:
    rows = list(measured([elementwise()], "cpu"))
    assert [row.part for row in rows] == ["failed", "forward", "backward", "turned"]
    assert rows[0].failed == {"peer": "ValueError: not"}
    for row in rows[1:]:
        assert row.milliseconds.keys() == row.share.keys() == {"eager", "ours"}
        assert all(share > 0 for share in row.share.values())


def test_a_step_has_a_peak_that_counts_the_gradient() -> None:
    weight = torch.randn(1000, 1000)
    problem = Problem(
        op="sum",
        shape="1000 x 1000",
        leaves=[weight],
        sides={"eager": torch.sum},
        limit="flops",
        work={"step": weight.numel()},
    )
    first, second = (row.peak["eager"] for _ in range(2) for row in measured([problem], "cpu"))
    assert weight.nbytes <= first < 1.1 * weight.nbytes
    assert second == first  # although there is a gradient already


def test_a_peak_is_above_what_was_there_before() -> None:
    held = torch.ones(1 << 20)
    assert held.nbytes <= peak_bytes(lambda: held + 1, "cpu") < held.nbytes + 1000


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_problems_whose_sides_agree(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert op in registry.ops()
    module = __import__(f"veomni_hook.bench.problems.{op}", fromlist=["_CPU"])
    small = tuple(min(number, 16) if number > 8 else number for number in module._CPU[0])
    monkeypatch.setattr(module, "_CPU", (small,))
    (problem,) = problems(op, "cpu")
    sides = {name: side for name, side in problem.sides.items() if name != "compile"}
    assert "eager" in sides
    found = {}
    for name, side in sides.items():
        results = side(*problem.leaves)
        found[name] = results if isinstance(results, tuple) else (results,)
    for results in found.values():
        for ours, upstream in zip(results, found["eager"], strict=True):
            torch.testing.assert_close(ours, upstream, rtol=2e-2, atol=2e-2)
    assert problem.work.keys() == {"forward", *problem.incoming} if problem.incoming else {"step"}


def test_the_table_and_the_record(tmp_path: Path) -> None:
    row = Row(
        "op", "step", "float32", "4 x 4", "bytes", 8, {"eager": 1.5}, {"eager": 0.5}, {"eager": 3 << 20}
    )
    assert record.cells(row, ["eager", "ours"]) == [
        "op",
        "step",
        "float32",
        "4 x 4",
        "1.500 ms, 50.0 %, 3 MiB",
        "-",
    ]
    facts = record.described("op", "cpu", [row])
    record.write(facts, tmp_path / "deep" / "record.json")
    found = json.loads((tmp_path / "deep" / "record.json").read_text())
    assert found["rows"][0]["milliseconds"] == {"eager": 1.5}
    assert {"device", "torch", "date", "command", "copy_bytes_per_second"} <= found.keys()


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from veomni_hook.bench.plot import write_plot

    row = Row("op", "step", "float32", "4 x 4", "bytes", 8, {"eager": 1.5}, {"eager": 0.5}, {})
    write_plot([row], "a run", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_ops_list_those_that_there_are() -> None:
    with pytest.raises(KernelError, match="norm") as caught:
        checked(["norm"])
    assert caught.value.fix.startswith("ops: rms_norm, add_rms_norm")
