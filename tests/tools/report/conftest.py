"""The two pages that tests look at: of the command, and of a live model; both with a user's hostile patch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config
from typer.testing import CliRunner

from tests.kernels.patched_qwen3 import SIZES, UPSTREAM, batch
from veomni_hook.finders.loader import PatchedLoader
from veomni_hook.finders.outcome import Outcome
from veomni_hook.finders.prepare import prepare
from veomni_hook.finders.state import STATE
from veomni_hook.settings import resolve
from veomni_hook.tools.cli.app import app
from veomni_hook.tools.report.explanation import explain

HERE = Path(__file__).parent
NAME = f"{UPSTREAM}_live"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nobody's settings but the hostile config and a cache of its own."""
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    held = STATE.resolved, STATE.store, dict(STATE.outcomes)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("VEOMNI_")]:
            patch.delenv(name)
        patch.setenv("VEOMNI_CACHE_DIR", str(folder))
        patch.setenv("VEOMNI_PATCHES", "hostile_config")
        patch.syspath_prepend(str(HERE))
        STATE.resolved = STATE.store = None
        yield
    STATE.resolved, STATE.store, STATE.outcomes = held


@pytest.fixture(scope="module")
def written(settings: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `veomni-hook report` about three families on another machine."""
    file = tmp_path_factory.mktemp("written") / "report.html"
    done = CliRunner().invoke(app, ["report", "qwen3", "dbrx", "auto", "--system", "sm90", "-o", str(file)])
    assert done.exit_code == 0, done.output
    assert f"wrote {file}" in done.stderr
    return file


@pytest.fixture(scope="module")
def live(settings: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `explain(model).to_html(path)` after a forward in training, and one in evaluation.

    The patched module has a name of its own, because others use the installed one in this process.
    """
    found = prepare(UPSTREAM, resolve().settings)
    assert found.stored_path is not None and found.report is not None
    loader = PatchedLoader(NAME, found.stored_path, upstream=found.original_path)
    spec = loader.spec()
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    loader.exec_module(module)
    STATE.outcomes[NAME] = Outcome(
        module=NAME, patched=True, origin=found.original_path, stored=found.stored_path,
        patch_hash=found.patch_hash, read_report=found.report.to_dict,
    )  # fmt: skip
    model = module.Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)).train()
    model(**batch())
    with torch.no_grad():
        model.eval()(**batch())
    file = tmp_path_factory.mktemp("live") / "live.html"
    assert explain(model).to_html(file) is None
    assert explain(model).to_html() == file.read_text(encoding="utf-8")
    return file
