"""Metadata, constraints, Makefile and CI script agree with one another."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import veomni_hook
from veomni_hook.releases import TESTED

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins():
    """The development constraints by canonical name."""
    found = {}
    for line in (ROOT / "constraints-dev.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line).groups()
            found[canonicalize_name(name)] = Version(version)
    return found


def requirements(*extras):
    """What the package and these extras ask for, the package itself left out."""
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in extras for line in PROJECT["optional-dependencies"][extra]),
    ]
    return [found for found in map(Requirement, lines) if found.name != PROJECT["name"]]


def targets():
    """The Makefile's phony targets that also have a rule."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    declared = set(re.search(r"^\.PHONY: (.+)$", text, re.M).group(1).split())
    return {name for name in declared if re.search(rf"^{name}:", text, re.M)}


@pytest.mark.parametrize("name", TESTED)
def test_every_tested_release_is_in_range_and_the_pinned_one_is_tested(name):
    (requirement,) = (found for found in requirements() if found.name == name)
    assert all(map(requirement.specifier.contains, TESTED[name]))
    assert list(TESTED[name]) == sorted(TESTED[name], key=Version)
    assert str(pins()[name]) in TESTED[name]


@pytest.mark.parametrize(
    ("name", "outside"), [("transformers", "5.1.0"), ("transformers", "6.0.0"), ("torch", "2.5.1")]
)
def test_what_is_not_supported_is_out_of_range(name, outside):
    (requirement,) = (found for found in requirements() if found.name == name)
    assert not requirement.specifier.contains(outside)


def test_the_extras_are_the_documented_ones():
    assert set(PROJECT["optional-dependencies"]) == {"gpu", "npu", "demo", "dev"}
    assert {found.name for found in requirements("demo")} >= {"accelerate", "matplotlib", "peft"}


def test_constraints_pin_everything_that_development_installs_inside_its_range():
    pinned = pins()
    asked = requirements("demo", "dev")
    outside = {r.name: pinned.get(canonicalize_name(r.name)) for r in asked}
    wrong = [r for r in asked if (v := outside[r.name]) is None or not r.specifier.contains(v)]
    assert wrong == []


def test_versions_agree():
    assert Version(PROJECT["version"]) == Version(veomni_hook.__version__)
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ci_runs_the_lint_and_test_targets():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    called = (
        re.search(r"^exec timeout .* make (.+)$", script.read_text(encoding="utf-8"), re.M).group(1).split()
    )
    assert "test" in called
    assert set(called) <= targets()


def test_ci_ends_within_forty_minutes():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    whole, killed = (
        int(re.search(rf"{name}=(\d+)", script, re.M)[1]) for name in ("^seconds", "--kill-after")
    )
    assert whole + killed < 40 * 60 and f'--kill-after={killed} "$left"' in script


@pytest.mark.parametrize("user", ["0", "1000"])
def test_ci_goes_on_where_no_browser_can_be_installed(user, tmp_path):
    stubs = {"id": f"echo {user}", "apt-get": "exit 100", "make": 'echo made "$@"'}
    for name, what in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{what}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("sh", "date", "dirname", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [str(ROOT / ".ci" / "run")], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == [
        "there is no chromium here: the tests in a browser are skipped",
        "made lint test",
    ]
    assert ("installing chromium" in done.stdout) is (user == "0")


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_every_make_target_that_a_document_names_exists(document):
    named = set(re.findall(r"(?m)(?:^|`)make ([a-z]+)", (ROOT / document).read_text(encoding="utf-8")))
    assert named
    assert named <= targets()


def test_help_lists_every_target_of_the_makefile():
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^make ([a-z]+)", listed, re.M)) == targets() - {"help", "setup"}


@pytest.mark.parametrize("target", ["demo", "test", "lint", "bench", "matrix"])
def test_working_targets_set_the_environment_up_first(target, tmp_path):
    # A dry run with an environment that is not there: the set-up has to come before the target's own command.
    said = subprocess.run(
        ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    order = [
        said.index(word) for word in ("-m venv", "constraints-dev.txt torch\n", "--no-build-isolation -e")
    ]
    assert order == sorted(order)
    assert len(said[order[-1] :].splitlines()) > 1


def test_a_finished_setup_is_not_repeated(tmp_path):
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").touch()
    (tmp_path / "venv" / ".installed").touch()
    command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}", "test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "install" not in done.stdout
    assert "pytest" in done.stdout


def test_the_matrix_covers_every_release_without_the_pins_that_differ(monkeypatch, tmp_path):
    sys.path.insert(0, str(ROOT))
    try:
        import noxfile
    finally:
        sys.path.remove(str(ROOT))
    monkeypatch.chdir(ROOT)
    assert [each.args[0] for each in noxfile.matrix.parametrize] == [*TESTED["transformers"]]
    kept = noxfile.shared_constraints(tmp_path).read_text(encoding="utf-8")
    assert f"torch=={pins()['torch']}" in kept
    for name in ("transformers==", "tokenizers==", "huggingface_hub=="):
        assert name in (ROOT / "constraints-dev.txt").read_text(encoding="utf-8")
        assert name not in kept
