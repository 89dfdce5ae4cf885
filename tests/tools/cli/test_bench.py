from __future__ import annotations

from .conftest import Command


def test_an_unknown_op_is_wrong_use(tiny: Command) -> None:
    done = tiny("bench", "norm")
    assert (done.status, done.out) == (2, "")
    assert "add_rms_norm, attention_sinks" in done.err
