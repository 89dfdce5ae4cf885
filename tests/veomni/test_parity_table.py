"""The table of what serves VeOmni's patches is what its script writes today, where VeOmni is installed."""

import importlib.util
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts import veomni_parity

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    importlib.util.find_spec("veomni") is None or version("transformers") != veomni_parity.WRITTEN_FOR,
    reason=f"needs the package veomni and transformers {veomni_parity.WRITTEN_FOR}",
)
def test_the_table_is_current():
    # A process of its own: VeOmni's configs import much, and patch nothing here.
    command = [sys.executable, "-m", "scripts.veomni_parity", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"python -m scripts.veomni_parity writes it anew\n{done.stderr[-2000:]}"
