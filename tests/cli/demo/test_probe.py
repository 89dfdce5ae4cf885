"""The probe's instruments, on work whose answer is known."""

from __future__ import annotations

import pytest
import torch

from veomni_hook.cli.demo import probe

MEBIBYTE = 2**20


def hold(*sizes: int) -> float:
    """Allocate tensors of these many MiB, all held at once."""
    held = [torch.zeros(size * MEBIBYTE, dtype=torch.uint8) for size in sizes]
    return float(len(held))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda: hold(40, 20), 60),
        (lambda: hold(40) + hold(20), 40),
        (lambda: hold(8) + hold(40) + hold(8), 40),
    ],
)
def test_the_peak_is_the_most_that_was_held_at_once(step, expected):
    peak, _ = probe._peak_memory(step, "cpu")
    assert peak / MEBIBYTE == pytest.approx(expected, abs=0.1)


def test_what_was_allocated_before_does_not_count():
    before = torch.zeros(64 * MEBIBYTE, dtype=torch.uint8)
    peak, result = probe._peak_memory(lambda: hold(4), "cpu")
    assert peak / MEBIBYTE == pytest.approx(4, abs=0.1)
    assert result == 1.0
    assert before.numel() == 64 * MEBIBYTE


def test_a_reimport_executes_the_module_again(tmp_path, monkeypatch):
    (tmp_path / "counted.py").write_text("import builtins\nbuiltins.executions += 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("builtins.executions", 0, raising=False)
    assert probe.reimport("counted") > 0
    assert probe.reimport("counted") > 0
    import builtins

    assert builtins.executions == 2
