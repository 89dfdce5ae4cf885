import pytest

from tests.kernels.decisions import decisions, table
from veomni_hook.kernels.selection.registry import built_in


@pytest.mark.parametrize("op", built_in())
def test_decisions_are_those_of_the_table(op):
    """A change of any decision shows as a change of a table; `python -m tests.kernels.decisions` writes them."""
    assert decisions(op) == table(op).read_text(encoding="utf-8")
