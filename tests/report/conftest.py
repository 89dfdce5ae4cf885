"""The two pages that tests look at: of the command, and of a live model; both with a user's hostile patch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from veomni_hook.cli.app import app
from veomni_hook.finders.state import STATE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="package")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Nobody's settings, a cache of its own, and the hostile config."""
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VEOMNI_")}
    return {
        **kept,
        "VEOMNI_CACHE_DIR": str(folder),
        "VEOMNI_PATCHES": "hostile_config",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT))),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="package")
def written(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `veomni-hook report` about three families on another machine."""
    file = tmp_path_factory.mktemp("written") / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("VEOMNI_")]:
            patch.delenv(name)
        for name in ("VEOMNI_CACHE_DIR", "VEOMNI_PATCHES"):
            patch.setenv(name, environ[name])
        patch.syspath_prepend(str(HERE))
        held = STATE.resolved, STATE.store
        STATE.resolved = STATE.store = None
        try:
            done = CliRunner().invoke(
                app, ["report", "qwen3", "gpt_neox", "auto", "--system", "sm90", "-o", str(file)]
            )
        finally:
            STATE.resolved, STATE.store = held
    assert done.exit_code == 0, done.output
    assert f"wrote {file}" in done.stderr
    return file


@pytest.fixture(scope="package")
def live(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `explain(model).to_html(path)` after a step of training."""
    file = tmp_path_factory.mktemp("live") / "live.html"
    script = str(HERE / "facts_of_live_page.py")
    done = subprocess.run(
        [sys.executable, script, str(file)], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return file
