from __future__ import annotations

from pathlib import Path

from tests.tools.migration.example import config_module
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.tools.migration.written import beside, written_for


def test_the_config_says_it():
    assert written_for(PatchConfig("a.b", transformers_version=">=5.9.0")) == "5.9.0"


def test_the_generated_file_says_it(tmp_path: Path):
    path = config_module(tmp_path, written_for="5.12.1")
    config = PatchConfig(
        "a.b", "patched_modeling_upgraded_gpu.py", origin=f"{path}:3", label="not_loaded:config"
    )
    assert written_for(config) == "5.12.1"
    assert beside(str(path)) == "5.12.1"


def test_nothing_says_it(tmp_path: Path):
    path = tmp_path / "alone.py"
    path.write_text("")
    assert written_for(PatchConfig("a.b", origin=f"{path}:1")) == "" == beside(str(path))


def test_two_answers_are_none(tmp_path: Path):
    path = config_module(tmp_path)
    (path.parent / "generated" / "other.py").write_text("# Based on: transformers==5.2.0\n")
    assert beside(str(path)) == ""
