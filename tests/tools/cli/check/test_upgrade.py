"""An upgrade of transformers as a project meets it: the command in a process of its own, real idioms and configs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ..conftest import DATA, REPOSITORY, TINY, Command

FAMILY = "upgraded"
MODULE = f"transformers.models.{FAMILY}.modeling_{FAMILY}"
MODEL = """
import torch
from torch import nn


class UpgradedRMSNorm(nn.Module):
    def __init__(self, size, epsilon=1e-6):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.gain * x.to(dtype)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A copy of the stand-in for transformers, with a family that idioms know."""
    shutil.copytree(DATA / "hub", tmp_path / "site", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "site" / "transformers" / "models" / FAMILY
    folder.mkdir()
    (folder / f"modeling_{FAMILY}.py").write_text(MODEL)
    return tmp_path / "site" / "transformers"


@pytest.fixture
def project(site: Path, tiny: Command) -> Command:
    """`veomni-hook` in a project whose config patches `TinyNorm.forward`."""
    path = os.pathsep.join(map(str, (site.parent, DATA / "configs", REPOSITORY)))

    def run(*arguments: str, **variables: str | None):  # type: ignore[no-untyped-def]
        return tiny(*arguments, PYTHONPATH=path, **variables)

    return run


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def upgrade(site: Path) -> None:
    """Release 5.100: the norm multiplies before the cast, the module under the project's patch adds two."""
    edit(site / "__init__.py", "5.99.0", "5.100.0")
    edit(
        site / "models" / FAMILY / f"modeling_{FAMILY}.py",
        "self.gain * x.to(dtype)",
        "(self.gain * x).to(dtype)",
    )
    edit(site / "models" / "tiny" / "modeling_tiny.py", "double(x) + self.bias", "double(x) + self.bias + 1")


@pytest.mark.slow
def test_what_an_upgrade_changed(project: Command, site: Path) -> None:
    written = project("check", "--write-lock")
    assert written.status == 0, written.err
    assert project("check").status == 0
    upgrade(site)
    done = project("check", "--json")
    assert done.status == 1
    changed = {one["target"]: one for one in done.json if "diff" in one and one["matters"]}
    assert set(changed) == {"UpgradedRMSNorm.forward", "TinyNorm.forward"}
    norm, tiny = changed["UpgradedRMSNorm.forward"], changed["TinyNorm.forward"]
    assert (norm["module"], norm["kind"], norm["verdict"]) == (MODULE, "rms_norm", "formula changed")
    assert "+    return (self.gain * x).to(dtype)\n" in norm["diff"]
    assert (tiny["module"], tiny["kind"], tiny["verdict"]) == (TINY, "method_override", "formula changed")
    assert "+    return double(x) + self.bias + 1\n" in tiny["diff"]
    assert "tiny_config:config" in tiny["detail"]
    readable = project("check")
    assert readable.status == 1 and "(transformers 5.99.0, now 5.100.0)" in readable.out
    assert norm["diff"] in readable.out and tiny["diff"] in readable.out
    assert project("check", "--write-lock").status == 0 and project("check").status == 0


def test_a_family_and_what_is_routed_there(project: Command) -> None:
    done = project("check", FAMILY, "--json")
    (verdict,) = done.json
    assert (verdict["verdict"], verdict["kind"], verdict["target"]) == (
        "applies",
        "route",
        "UpgradedRMSNorm.forward",
    )
    assert verdict["detail"].startswith("rms_norm/cast_before_weight, lines ")
    (row,) = project("list", "--by", "module", FAMILY, "--json").json
    assert (row["from"], row["routes"], row["slots"]) == (
        "idioms",
        {"rms_norm": 1},
        ["veomni_rms_norm_cast_before_weight"],
    )
    assert "veomni_rms_norm_cast_before_weight.kernel(" in project("dump", FAMILY).out
    assert "+        if (kernel := veomni_rms_norm_cast_before_weight.kernel(" in project("diff", FAMILY).out
    assert "rms_norm/cast_before_weight" in project("explain", FAMILY, "--fast").out
    (covered,) = project("list", FAMILY, "--json").json
    assert (covered["op"], covered["variant"], covered["status"]) == (
        "rms_norm",
        "cast_before_weight",
        "routed",
    )


PATTERN = """
from veomni_hook import PatchConfig

config = PatchConfig("transformers.models.*.modeling_*")


@config.override_method("*Norm.forward")
def forward(self, x):
    return x


@config.override_method("*NoSuchThing.forward")
def forward(self, x):
    return x
"""


def test_a_config_for_a_pattern_is_checked_wherever_it_applies(project: Command, tmp_path: Path) -> None:
    (tmp_path / "everywhere.py").write_text(PATTERN)
    done = project("check", "--json", "--config", "everywhere", VEOMNI_PATCHES=None)
    assert done.status == 1
    found = {(v["target"], v["verdict"]) for v in done.json if v["config"] == "everywhere:config"}
    assert {("TinyNorm.forward", "applies"), ("UpgradedRMSNorm.forward", "applies")} <= found
    assert ("*NoSuchThing.forward", "FAILS") in found
    locked = project("check", "--write-lock", "--config", "everywhere", VEOMNI_PATCHES=None)
    assert "2 overridden bodies" in locked.err
    ambiguous = project("diff", "--config", "everywhere")
    assert ambiguous.status == 2 and "name one of them as the target" in ambiguous.err
    assert "+        return x\n" in project("diff", "tiny", "--config", "everywhere").out
