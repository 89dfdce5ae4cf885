from __future__ import annotations

import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from veomni_hook.finders.finder import PatchFinder
from veomni_hook.finders.state import STATE
from veomni_hook.releases import SUPPORTED, TESTED, span
from veomni_hook.settings import Settings, resolve
from veomni_hook.tools.cli import doctor
from veomni_hook.tools.cli.doctor import Findings, supported

from .conftest import DATA, REPOSITORY, TINY, Command


def test_the_whole_report(tiny: Command, cache_dir: Path) -> None:
    done = tiny("doctor", "--json", VEOMNI_KERNELS="eager")
    report = done.json
    assert (done.status, report["problems"]) == (0, []), done.out
    assert report["versions"]["python"].endswith(f"({sys.executable})")
    assert report["versions"]["torch"] and report["versions"]["transformers"]
    assert report["cache"]["location"] == str(cache_dir) and report["cache"]["writable"] is True
    assert report["hook"]["active here"] is False
    (row,) = [row for row in report["settings"] if row["setting"] == "kernels"]
    assert row == {
        "setting": "kernels",
        "value": "eager",
        "from": "VEOMNI_KERNELS",
        "beat": ["'auto' (default)"],
    }
    (spec,) = [row for row in report["specs"] if row["config"] == "tiny_config"]
    assert spec["from"] == "settings" and TINY in spec["patches"]
    (kernels,) = report["hardware"]["rms_norm"]
    assert kernels.startswith("eager for ")


def test_a_broken_config_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DATA / "configs"))
    findings, settings = Findings(), Settings(patches=("broken_config",))
    assert doctor.specs(findings, settings, load=False)[-1] == {
        "config": "broken_config", "from": "settings", "patches": None
    }  # fmt: skip
    assert findings.problems == []
    doctor.specs(findings, settings, load=True)
    assert len(findings.problems) == 1 and "broken_config" in findings.problems[0]


@pytest.mark.slow
def test_a_config_for_a_module_that_is_not_installed_is_a_problem(tiny: Command, tmp_path: Path) -> None:
    (tmp_path / "misnamed.py").write_text(
        "from veomni_hook import PatchConfig\n"
        "config = PatchConfig('transformers.models.qwen33.modeling_qwen33')\n"
    )
    done = tiny("doctor", "--json", VEOMNI_PATCHES="misnamed")
    assert done.status == 1
    (problem,) = [each for each in done.json["problems"] if "misnamed:config patches nothing" in each]
    assert "no installed module matches transformers.models.qwen33.modeling_qwen33; nearest: " in problem


class Foreign:
    """Somebody else's import hook."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return None


def test_import_hooks_ahead_of_ours_are_a_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = PatchFinder()
    monkeypatch.setattr(STATE, "finder", ours)
    monkeypatch.setattr(sys, "meta_path", [ours, Foreign(), *sys.meta_path])
    findings = Findings()
    doctor.hook(findings, Settings())
    assert not any("Foreign" in hazard for hazard in findings.hazards)
    monkeypatch.setattr(sys, "meta_path", [Foreign(), ours, *sys.meta_path])
    doctor.hook(findings, Settings())
    assert sum("Foreign" in hazard for hazard in findings.hazards) == 1


def test_sources_that_cannot_be_read_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bytecode(Foreign):
        def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if not name.startswith("transformers"):
                return None
            return ModuleSpec(name, loader=None, origin="bytecode", is_package="modeling_" not in name)

    monkeypatch.setattr(sys, "meta_path", [Bytecode(), *sys.meta_path])
    findings = Findings()
    doctor.hook(findings, Settings())
    assert len(findings.problems) == 1 and "bytecode" in findings.problems[0]


def test_missing_and_unsupported_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def version(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return "4.57.1" if name == "transformers" else "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    findings = Findings()
    assert doctor.versions(findings)["torch"] is None
    assert len(findings.problems) == 2
    assert "torch is not installed" in findings.problems[1 if "transformers" in findings.problems[0] else 0]
    assert any("4.57.1" in problem and ">=5.2,<6" in problem for problem in findings.problems)


def test_releases_newer_than_the_tested_ones_are_a_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    newest = {name: tested[-1] for name, tested in TESTED.items()}
    for newer in ({}, {"torch": "2.99.0+cpu"}, {"transformers": "5.99.0.dev0"}):
        found = newest | newer
        monkeypatch.setattr(importlib.metadata, "version", lambda name, found=found: found.get(name, "1.0"))
        findings = Findings()
        doctor.versions(findings)
        assert findings.problems == []
        assert findings.hazards == [
            f"{name} {version} is newer than what was tested, {span(name)}" for name, version in newer.items()
        ]


@pytest.mark.parametrize(
    ("version", "good"),
    [("5.2.0", True), ("5.23.0", True), ("5.1.9", False), ("6.0.0", False), ("5.24.0.dev0", True)],
)
def test_the_supported_range(version: str, good: bool) -> None:
    assert supported(version) is good


def test_the_range_is_the_one_in_pyproject() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    low, high = SUPPORTED
    assert f"transformers>={low[0]}.{low[1]},<{high[0]}" in project["dependencies"]


def test_every_setting_is_shown(tmp_path: Path) -> None:
    rows = doctor.settings_fields(resolve({}, str(tmp_path)))
    assert [row["setting"] for row in rows] == list(Settings.__dataclass_fields__)
