from __future__ import annotations

from ..conftest import Command


def test_the_installed_qwen3(veomni: Command) -> None:
    done = veomni("list", "qwen3", "--by", "family")
    header, row = (line.split(maxsplit=1) for line in done.out.splitlines())
    assert header == ["family", "routed ops"] and row[0] == "qwen3"
    ops = row[1].split(", ")
    assert ops == sorted(ops) and {"rms_norm", "rotary", "linear_cross_entropy"} < set(ops)
    assert "1 of 1 family with routed ops" in done.err
