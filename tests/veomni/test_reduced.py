"""`veomni-hook migrate` on VeOmni's own configs, where VeOmni is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.veomni.conftest import RELEASE

MODELS = "veomni.models.transformers"
#: Idioms serve all of the first, and the second in part; the others have name maps, helpers, exclusions and replacements elsewhere.
CONFIGS = (
    "qwen3.qwen3_gpu", "qwen3_moe.qwen3_moe_npu", "qwen3_vl_moe.qwen3_vl_moe_gpu",
    "qwen2_5_omni.qwen2_5_omni_gpu", "seed_oss.seed_oss_npu",
)  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_reduced_config_passes_check(name, tmp_path):
    config = f"{MODELS}.{name}_patch_gen_config"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "veomni_hook", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)

    made = run("migrate", config, "-o", "reduced.py", "--json")
    assert made.returncode == 0, made.stderr
    document = json.loads(made.stdout)
    assert document["written_for"] == RELEASE and document["problems"] == []
    kept = [one["target"] for one in document["patches"] if one["outcome"] == "kept"]
    if not kept:  # everything is served without it
        assert not (tmp_path / "reduced.py").exists()
        return
    checked = run("check", "--config", "reduced", "--json", "--against", RELEASE)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert [row["target"] for row in json.loads(checked.stdout)] == kept
