from __future__ import annotations

from tests.kernels.decisions import TABLE, decisions


def test_decisions_are_those_of_the_table():
    """A change of any decision shows as a change of the table; `python -m tests.kernels.decisions` writes it."""
    assert decisions() == TABLE.read_text(encoding="utf-8")
