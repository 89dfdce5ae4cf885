"""The Python blocks of the README and of docs/ run, in one process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import blocks, failures

ROOT = Path(__file__).resolve().parents[2]
#: Blocks of recipes.md are the scripts that tests/recipes runs.
RUN_ELSEWHERE = {"recipes.md"}
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name not in RUN_ELSEWHERE),
]


def test_they_run(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.blocks", *map(str, DOCUMENTS)],
        cwd=tmp_path,
        env={
            **environment,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "VEOMNI_CACHE_DIR": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_what_fails_is_named_and_what_is_marked_does_not_run(tmp_path: Path) -> None:
    document = tmp_path / "some-page.md"
    document.write_text(
        "```python\nx = 1\n```\n\n<!-- not run: needs a GPU -->\n```python\nno_such_name\n```\n\n"
        "```python\nassert x == 2\n```\n\n<!-- not run: -->\n```python\nx = 2\n```\n\n```\nno Python\n```\n"
    )
    assert [(line, reason) for line, _, reason in blocks(document.read_text())] == [
        (2, None),
        (7, "needs a GPU"),
        (11, None),
        (16, ""),
    ]
    failed, unexplained = failures(document, {})
    assert f'File "{document}:11", line 11' in failed and "AssertionError" in failed
    assert unexplained == f"{document}:16: `not run` has no reason"
