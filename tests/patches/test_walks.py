"""Who follows one RMSNorm, one module or one import through the package enters few files."""

import pytest

from tests.processes import facts, started


@pytest.mark.parametrize(
    ("walk", "most"), [("norm", 20), ("norm to splice", 35), ("idioms", 48), ("cold import", 232)]
)
def test_a_walk_enters_few_files(walk, most, tmp_path):
    files = facts(started("-m", "tests.patches.walks", walk, cache=tmp_path, VEOMNI_BANNER="0"))
    assert "patches/graph/forms.py" in files  # the idiom was asked
    assert len(files) <= most, files
