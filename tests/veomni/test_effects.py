"""What was measured of VeOmni's patches is what the probes find today; a broken effect is seen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import veomni_effects
from tests.veomni.configurations import CONFIGURATIONS
from tests.veomni.conftest import RELEASE

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("qwen3_moe", "qwen3_vl", "deepseek_v4")


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", "scripts.veomni_effects", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    _run("theirs", str(folder), "--families", *FAMILIES)
    return folder


def test_the_probes_find_what_is_written(records):
    found = json.loads(_run("ours", str(records), "--show", "--families", *FAMILIES))
    written = json.loads(veomni_effects.MEASURED.read_text(encoding="utf-8"))[RELEASE]
    for folder in FAMILIES:
        family = CONFIGURATIONS[folder][0]
        assert found[family] == written[family], family


def test_other_weights_are_seen(records, tmp_path):
    """The comparison could fail: with other weights, a step has neither VeOmni's numbers nor upstream's."""
    theirs, plain = torch.load(records / "theirs.pt"), str(tmp_path / "plain.pt")
    veomni_effects._run("ours", "plain", str(records / "theirs.pt"), plain, "qwen3_moe", HOOK="0")
    (record,) = theirs["qwen3_moe"]["classes"].values()
    record["weights"]["lm_head.weight"] *= 1.1
    torch.save(theirs, tmp_path / "theirs.pt")
    told = veomni_effects._run("ours", "numbers", str(tmp_path / "theirs.pt"), plain, "qwen3_moe")
    for lack in json.loads(told)["qwen3_moe"]["numbers"].values():
        assert lack.startswith("loss: ")
