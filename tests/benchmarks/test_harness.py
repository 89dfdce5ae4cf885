"""The benchmarks' shared parts: what passes, what is recorded, and that their patches apply."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import _harness, import_time  # noqa: E402
from benchmarks._families import FAMILIES  # noqa: E402
from benchmarks._harness import Row  # noqa: E402
from benchmarks._lora_worker import CASES  # noqa: E402
from benchmarks._record import record  # noqa: E402


@pytest.mark.parametrize(
    ("row", "ratio", "passed"),
    [
        (Row("a", 3.0, "ms", 2.0), 1.5, None),
        (Row("a", 3.0, "ms", 2.0, budget=3.0), 1.5, True),
        (Row("a", 3.0, "ms", budget=2.9), None, False),
        (Row("a", 3.0, "ms", 2.5, budget=1.0, judged=0.5), 1.2, True),
        (Row("a", 3.0, "ms", 2.0, budget=0.9, judged=1.0), 1.5, False),
        (Row("a", 3.0, "ms", 2.0, budget=0.0, judged=0.0), 1.5, True),
    ],
)
def test_a_row_knows_its_ratio_and_whether_its_budget_holds(row, ratio, passed):
    assert row.ratio == ratio
    assert row.passed is passed


@pytest.mark.parametrize(
    ("kind", "many", "order", "more"),
    [("family", "families", FAMILIES, {}), ("case", "cases", CASES, {"rank": 16})],
)
def test_results_of_other_families_and_cases_stay_in_the_file(tmp_path, kind, many, order, more):
    out = tmp_path / "results.json"
    first, second = list(order)[:2]
    for name, value in ((second, 2.0), (first, 1.0), (second, 3.0)):
        record("some_gpu", "cpu", out, order, {kind: name, "sides": {"eager": {"step_ms": value}}}, **more)
    written = json.loads(out.read_text())
    assert written["benchmark"] == "some_gpu" and written | more == written
    assert [(row[kind], row["sides"]["eager"]["step_ms"]) for row in written[many]] == [
        (first, 1.0),
        (second, 3.0),
    ]
    assert all(row["date"] for row in written[many])


@pytest.mark.parametrize(("budget", "status"), [(4.0, None), (2.0, 1)])
def test_results_are_recorded_and_a_missed_budget_is_the_exit_status(
    monkeypatch, tmp_path, capsys, budget, status
):
    monkeypatch.setattr(_harness, "ROOT", tmp_path)
    monkeypatch.setattr(_harness, "RESULTS", tmp_path / "results")
    rows = [Row("some work", 3.0, "ms", 2.0, "less work", budget=budget)]
    if status is None:
        _harness.finish("sample", rows)
    else:
        with pytest.raises(SystemExit) as raised:
            _harness.finish("sample", rows)
        assert raised.value.code == status
    record = json.loads((tmp_path / "results" / "sample-cpu.json").read_text(encoding="utf-8"))
    (row,) = record["rows"]
    assert row["ratio"] == 1.5
    assert row["passed"] is (status is None)
    assert record["environment"]["torch"]
    printed = capsys.readouterr().out
    assert "1.50x" in printed
    assert ("MISSED" in printed) is (status == 1)


def test_a_worker_that_fails_stops_the_benchmark(capfd):
    with pytest.raises(SystemExit, match="status 3"):
        _harness.in_fresh_interpreter(["-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"])
    assert "why" in capfd.readouterr().err


def test_the_install_benchmark_sees_what_is_loaded():
    seconds, heavy = _harness.in_fresh_interpreter(["-c", import_time.FRESH_IMPORT.format(module="torch")])
    assert seconds > 0.1
    assert heavy == ["torch"]


def test_installing_the_hook_loads_neither_torch_nor_transformers():
    _, heavy = _harness.in_fresh_interpreter(
        ["-c", import_time.FRESH_IMPORT.format(module="veomni_hook.install")]
    )
    assert heavy == []


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_omni_moe"])
def test_the_benchmarks_patches_apply(family):
    from benchmarks._patches import configs
    from veomni_hook.finders.prepare import prepare
    from veomni_hook.settings import Settings

    module = import_time.MODULES[family]
    chosen = [config for config in configs if config.source_module == module]
    applied = prepare(module, Settings(), configs=chosen).report.applied
    assert {patch.target for patch in applied} >= {"apply_rotary_pos_emb"}
    assert len([patch for patch in applied if patch.target.endswith("RMSNorm.forward")]) >= 1
