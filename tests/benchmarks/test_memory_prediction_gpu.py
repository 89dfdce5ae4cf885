"""`memory_prediction_gpu`: what it records of a small set-up on a CPU."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import memory_prediction_gpu as benchmark


@pytest.mark.slow
# Tests before it may have imported transformers.
@pytest.mark.filterwarnings("default::veomni_hook.errors.AlreadyImportedWarning")
def test_a_setup_that_fails_is_reported_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    right = benchmark.Setup("small", 32, optimizer={}, checkpoint=True)
    wrong = benchmark.Setup("small", 32, adapters={"target_modules": ["absent"]})
    monkeypatch.setattr(benchmark, "SETUPS", (wrong, right))
    # Activation looks at what is imported; other tests of this process make modules with slots by hand.
    for name in [name for name in sys.modules if name.endswith("_with_slots")]:
        monkeypatch.delitem(sys.modules, name)
    benchmark.main(["--device", "cpu", "--out", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["setups"]
    assert "absent" in rows[0]["error"]
    assert rows[1]["parts"]["weights"] < rows[1]["predicted"]
    assert "small, 1 x 32, checkpoints, AdamW" in capsys.readouterr().out
