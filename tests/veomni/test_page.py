"""docs/veomni.md by its own commands: every config of VeOmni trains, and so does what `migrate` leaves of it.

A process for each command, a transformers model, and no function of VeOmni called. The losses are those of VeOmni's
generated modules, whose slots VeOmni's own code has bound to eager code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.veomni.conftest import RELEASE, ROOT, in_process
from tests.veomni.sides import CONFIGS, config_module
from tests.veomni.standins import install
from tests.veomni.unable import UNABLE

#: Linear attention has no eager code: VeOmni's side runs `linear_attention`, ours runs our kernels.
OUR_KERNELS = {folder for (folder, _), unable in UNABLE.items() if "varlen" in unable.error}
each_config = pytest.mark.parametrize(("folder", "device"), CONFIGS)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The losses with VeOmni's generated modules; one process for each device."""

    @cache
    def of_device(device: str) -> dict[str, Any]:
        folders = [folder for folder, named in CONFIGS if named == device]
        cache_dir = tmp_path_factory.mktemp("generated") / "cache"
        found: dict[str, Any] = in_process(cache_dir, "generated", device, *folders, configs=[], HOOK="0")
        return found

    return lambda folder, device: of_device(device)[folder]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder in which commands run."""
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def run(home):
    """Run a command of the page in a process of its own; the cache is shared."""
    for package in {unable.package for unable in UNABLE.values()} - {""}:
        install(package, home / "stand_ins" / package)

    def command(folder: str, device: str, *arguments: str, **settings: str) -> str:
        unable = UNABLE.get((folder, device))
        stand_ins = [str(home / "stand_ins" / unable.package)] if unable and unable.package else []
        # pytest imports readline, which sets COLUMNS for the processes of xdist: tables would be narrow.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("VEOMNI_") and name != "COLUMNS"
        } | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(home), *stand_ins]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VEOMNI_CACHE_DIR": str(home / "cache"),
            "VEOMNI_DEVICE": device,
        }
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=home, env=environment | settings, capture_output=True,
            text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    return command


def losses(text: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads(text.splitlines()[-1])
    return found


def near(theirs: dict[str, list[float]]) -> dict[str, Any]:
    return {trained: pytest.approx(steps, rel=1e-4) for trained, steps in theirs.items()}


@each_config
def test_a_config_trains_with_the_losses_of_the_generated_module(generated, run, folder, device):
    theirs = generated(folder, device)
    train = ("tests.veomni.page", folder)
    config = config_module(folder, device)
    assert losses(run(folder, device, *train, VEOMNI_PATCHES=config)) == near(theirs)
    alone = losses(run(folder, device, *train, VEOMNI_PATCHES=config, VEOMNI_IDIOMS="0"))
    assert alone == (near(theirs) if folder in OUR_KERNELS else theirs)


@each_config
def test_a_reduced_config_trains_in_both_orders_of_import(generated, run, folder, device):
    name = f"{folder}_{device}_patches"
    config = config_module(folder, device)
    written = run(folder, device, "veomni_hook", "migrate", config, "-o", f"{name}.py", "--json")
    document = json.loads(written)
    assert document["written_for"] == RELEASE and document["problems"] == []
    train = ("tests.veomni.page", folder)
    for first in ((), ("veomni.ops",)):
        kept = any(one["outcome"] == "kept" for one in document["patches"])
        patches = {"VEOMNI_PATCHES": name} if kept else {}  # of some, nothing is left
        ours = losses(run(folder, device, *train, *first, VEOMNI_STRICT="1", **patches))
        assert ours == near(generated(folder, device)), first


def test_the_examples_of_the_page(run, home):
    """The first command names a config that is trained above; `migrate` prints what is shown.

    `test_loader` runs the blocks of Python.
    """
    page = (ROOT / "docs/veomni.md").read_text(encoding="utf-8")
    folder, device = "qwen3_moe", "gpu"
    (config,) = re.findall(r"^VEOMNI_PATCHES=(\S+) python train\.py$", page, re.MULTILINE)
    assert config == config_module(folder, device)
    (migrate,) = re.findall(r"^veomni-hook (migrate .+)$", page, re.MULTILINE)
    printed = " ".join(run(folder, device, "veomni_hook", *migrate.split()).split())
    shown = re.findall(r"^(?:covered|kept)  .+$", page, re.MULTILINE)
    missing = [line for line in shown if " ".join(line.split()) not in printed]
    assert len(shown) == 3 and not missing, printed
    assert "6 covered, 3 kept" in printed and "three of nine patches" in page
