"""Who follows one RMSNorm, one module or one import through the package enters few files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("walk", "most"), [("norm", 20), ("norm to splice", 35), ("idioms", 47), ("cold import", 225)]
)
def test_a_walk_enters_few_files(walk, most, tmp_path):
    settings = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.patches.walks", walk],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**settings, "VEOMNI_CACHE_DIR": str(tmp_path), "VEOMNI_BANNER": "0"},
    )
    files = json.loads(done.stdout)
    assert "patches/graph/forms.py" in files  # the idiom was asked
    assert len(files) <= most, files
