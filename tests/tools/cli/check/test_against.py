from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.tools.migration.example import FAMILY, MODULE, NAME, NEW, OLD, PACKAGE, config_module, package
from veomni_hook.tools.cli.app import app
from veomni_hook.tools.cli.inputs import release

DATA = Path(__file__).parents[3] / "data"

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`veomni-hook` where 5.9.0 is installed and a config for it can be imported."""
    monkeypatch.chdir(tmp_path)
    for place in (DATA, tmp_path / "configs", tmp_path / "installed"):
        monkeypatch.syspath_prepend(str(place))
    monkeypatch.delenv("VEOMNI_PATCHES", raising=False)
    package(tmp_path / "installed", "5.9.0", OLD)
    package(tmp_path / "newer", "5.23.0", NEW)
    config_module(tmp_path / "configs")

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments])

    yield invoke
    for name in [n for n in sys.modules if n.partition(".")[0] in (PACKAGE, "patchgen_double")]:
        del sys.modules[name]


def test_what_is_printed(run: Run) -> None:
    done = run("check", "--config", NAME, "--against", "newer")
    assert done.exit_code == 1, done.output
    assert f"{MODULE}, written for transformers 5.9.0, in 5.23.0" in done.output
    rows = {
        line.split()[1]: line.split()[0] for line in done.output.splitlines() if "method_override" in line
    }
    assert rows["UpgradedRMSNorm.forward"] == "unnecessary" and rows["UpgradedModel.angles"] == "gone"
    assert "moved: " in done.output and "+    return self.norm(x) - 1" in done.output
    assert done.output.splitlines()[-1] == "1 unnecessary, 1 moved, 2 gone, 3 apply"


def test_json_and_the_installed_release(run: Run) -> None:
    done = run("check", "--config", NAME, "--against", "5.9.0", FAMILY, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert {row["verdict"] for row in rows} == {"applies", "unnecessary"}
    first = rows[0]
    assert (first["written_for"], first["release"], first["device"]) == ("5.9.0", "5.9.0", "gpu")
    assert first["ops"] == ["rms_norm/cast_before_weight"] and first["concerns"] == ["kernel"]


def test_written_for_decides_what_has_moved(run: Run) -> None:
    done = run("check", "--config", NAME, "--against", "newer", "--written-for", "newer", "--json")
    assert "moved" not in {row["verdict"] for row in json.loads(done.stdout)}


def test_a_config_for_another_release_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "installed" / "transformers" / "__init__.py").write_text('__version__ = "5.23.0"\n')
    done = run("check", "--config", NAME, FAMILY)
    assert "was made for transformers 5.9.0, and 5.23.0 is installed" in done.output
    assert f"veomni-hook check --config {NAME} --against 5.23.0" in done.output


def test_a_config_that_cannot_be_loaded_names_package_and_release(run: Run, tmp_path: Path) -> None:
    config_module(tmp_path / "configs", "import not_installed_at_all\n", written_for="5.2.0")
    done = run("check", "--config", NAME, "--against", "newer")
    assert done.exit_code == 2
    assert "install the package that provides not_installed_at_all" in done.output
    assert "made for transformers 5.2.0, and 5.9.0 is installed" in done.output


def test_a_module_that_the_release_does_not_have(run: Run, tmp_path: Path) -> None:
    (tmp_path / "newer" / "transformers" / "models" / FAMILY / f"modeling_{FAMILY}.py").unlink()
    done = run("check", "--config", NAME, "--against", "newer")
    assert done.exit_code == 1 and f"transformers 5.23.0 has no module {MODULE}" in done.output


def wheel_of(folder: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(folder.rglob("*.py")):
            archive.write(path, path.relative_to(folder))
        archive.writestr("transformers/trainer.py", "")


def test_a_wheel(run: Run, tmp_path: Path) -> None:
    wheel = tmp_path / "transformers-5.23.0-py3-none-any.whl"
    wheel_of(tmp_path / "newer", wheel)
    done = run("check", "--config", NAME, "--against", str(wheel))
    assert done.exit_code == 1 and "in 5.23.0" in done.output
    with release.release(str(wheel), "--against") as tree:
        assert tree.version == "5.23.0" and [*tree.files([FAMILY])] == [MODULE]
        assert not Path(tree.folder, "trainer.py").exists(), "patches cannot concern it"
    assert not Path(tree.folder).exists()


# What pip says, if it is asked.
@pytest.mark.parametrize(
    ("arguments", "stderr", "said"),
    [
        (["--against", "newer"], "", "there is no config to judge"),
        (["--written-for", "newer"], "", "--against RELEASE"),
        (["--config", NAME, "--against", "nowhere.whl"], "", "there is no such wheel"),
        (["--config", NAME, "--against", "latest"], "", "'latest' is no release of transformers"),
        (["--config", NAME, "--against", "configs"], "", "no transformers package in configs"),
        (["--config", NAME, "--against", "broken.whl"], "", "the wheel cannot be read"),
        (["--config", NAME, "--against", "9.9.9"], "", "pip ended with status 1"),
        (["--config", NAME, "--against", "9.9.9"], "ERROR: No network", "transformers==9.9.9 cannot be downloaded: ERROR: No network"),
        (["--config", NAME, "--against", "9.9.9"],
         "ERROR: Could not find a version (from versions: 5.21.0, 5.22.0, 5.23.0)\n"
         "ERROR: No matching distribution found for transformers==9.9.9",
         "there is no release 9.9.9 of transformers"),
    ],
)  # fmt: skip
def test_wrong_use(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], stderr: str, said: str
) -> None:
    (tmp_path / "broken.whl").write_text("no archive")
    failed = SimpleNamespace(returncode=1, stderr=stderr)
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: failed)
    done = run("check", *arguments)
    assert done.exit_code == 2 and said in done.output and "--against" in done.output


def test_a_download(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "transformers==5.23.0"
        folder = Path(command[command.index("--dest") + 1])
        wheel_of(tmp_path / "newer", folder / "transformers-5.23.0-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(release.subprocess, "run", pip)
    done = run("check", "--config", NAME, "--against", "5.23.0")
    assert done.exit_code == 1 and "in 5.23.0" in done.output
