"""`VEOMNI_DUMP_PATCHED=1` on any script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.finders.conftest import TINY, Python

CODE = f"import veomni_hook.install, {TINY} as m; print(m.__file__)"


def test_every_patched_module_and_its_diff_are_written(python: Python, tmp_path: Path) -> None:
    for _ in range(2):  # also from a warm cache
        ran = python(CODE, VEOMNI_DUMP_PATCHED="1", VEOMNI_DUMP_DIR="out")
        path = tmp_path / "out" / "models" / "tiny" / "modeling_tiny.py"
        assert ran.err.count("veomni-hook: dumped ") == 1
        assert str(path.relative_to(tmp_path)) in ran.err
    dumped, stored = path.read_text(), Path(ran.out.strip()).read_text()
    different = [(a, b) for a, b in zip(dumped.splitlines(), stored.splitlines(), strict=True) if a != b]
    assert different == [("from transformers.activations import double", "from ...activations import double")]
    diff = path.with_suffix(".diff").read_text()
    assert "+        return double(x) + self.bias + 100  # noqa: F821" in diff
    assert "[PATCHED" not in diff


def test_the_dump_runs_by_itself(python: Python, tmp_path: Path) -> None:
    python(CODE, VEOMNI_DUMP_PATCHED="1")
    path = tmp_path / "veomni_patched" / "models" / "tiny" / "modeling_tiny.py"
    ran = python(f"import runpy; print(runpy.run_path({str(path)!r})['TinyNorm']().forward(1))")
    assert ran.out.strip() == "103", ran.err
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", str(path)], check=False
    )
    assert done.returncode == 0


def test_a_dump_folder_that_cannot_be_made_is_a_warning(python: Python, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = python(CODE, VEOMNI_DUMP_PATCHED="1", VEOMNI_DUMP_DIR="file")
    assert ran.code == 0
    assert "cannot be dumped to file" in ran.err
