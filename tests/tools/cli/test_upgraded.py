"""`check --against` and `migrate` of configs as VeOmni writes them: see `tests.tools.cli.transcript`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools.migration.example import (
    CONFIG,
    FAMILY,
    MODULE,
    NAME,
    NEW,
    OLD,
    PACKAGE,
    config_module,
    package,
)
from veomni_hook.tools.cli.inputs import release

from .conftest import DATA, Done
from .transcript import compare, here, installed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with configs for 5.9.0, which is installed; beside them a copy of it, and 5.23.0. None is downloaded."""
    monkeypatch.chdir(tmp_path)
    installed(
        *(DATA, tmp_path / "configs", tmp_path / "installed", tmp_path / "made"), monkeypatch=monkeypatch
    )
    monkeypatch.delenv("VEOMNI_PATCHES", raising=False)
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: pytest.fail("a download"))
    for name in ("installed", "before"):
        package(tmp_path / name, "5.9.0", OLD)
    package(tmp_path / "newer", "5.23.0", NEW)
    config = config_module(tmp_path / "configs")
    for name, text in VARIANTS.items():
        config.with_name(f"{name}.py").write_text(text)
    return tmp_path


def variant(*changes: tuple[str, str]) -> str:
    """The config with some of its text changed."""
    text = CONFIG
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


_FORWARD = '@config.override_method("UpgradedModel.forward", description="gather the output")'
VARIANTS = {
    "renamed": variant(
        (
            "    return gather_outputs(doubled(self.norm(x)))",
            "    if veomni_causal_lm_loss.use_non_eager_impl:\n        return OtherModel\n    return gather_outputs(x)",
        ),
        (
            _FORWARD,
            _FORWARD.replace(
                'description="gather the output"', 'name_map={"Other": "Upgraded", "Absent": "X"}'
            ),
        ),
    ),
    "importing": variant(
        (
            'config.drop_import_names("NotImportedThere")',
            'config.drop_import_names("ModelOutput")\nconfig.add_import("outputs", names=["ModelOutput"])',
        )
    ),
    "talking": variant(("def model_same(self, x)", "def model_same(self, x, y)")),
    "covered": CONFIG.partition(_FORWARD)[0],
    "unloadable": "import not_installed_at_all\n",
    "of_a_pattern": "from veomni_hook import PatchConfig\nconfig = PatchConfig('transformers.models.*.modeling_*')\n",
    "of_three": f"{CONFIG}\nconfigs = [PatchConfig('a'), PatchConfig('b')]\n",
    "of_none": variant((MODULE, "transformers.models.gone.modeling_gone")),
}


def run(words: list[str], variables: dict[str, str | None]) -> Done:
    """Run a command that imports the configs anew."""
    done = here(words, variables)
    for name in [n for n in sys.modules if n.partition(".")[0] in (PACKAGE, "patchgen_double", "reduced")]:
        del sys.modules[name]
    return done


@pytest.mark.parametrize("name", ["against", "migrate"])
def test_what_is_printed(name: str) -> None:
    compare(name, run, {"REPOSITORY": DATA.parents[1]})


def wheel_of(folder: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(folder.rglob("*.py")):
            archive.write(path, path.relative_to(folder))
        archive.writestr("transformers/activations.py", "")
        archive.writestr("transformers/pipelines.py", "")


def test_a_wheel(folder: Path) -> None:
    wheel = folder / "transformers-5.23.0-py3-none-any.whl"
    wheel_of(folder / "newer", wheel)
    done = run(["check", "--config", NAME, "--against", str(wheel)], {})
    assert done.status == 1 and "in 5.23.0" in done.out
    with release.release(str(wheel), "--against") as tree:
        assert tree.version == "5.23.0" and [*tree.files([FAMILY])] == [MODULE]
        assert Path(tree.folder, "activations.py").exists(), "a config may be for it"
        assert not Path(tree.folder, "pipelines.py").exists(), "patches cannot concern it"
    assert not Path(tree.folder).exists()


@pytest.mark.parametrize(
    ("pip", "said"),
    [
        ("", "pip ended with status 1"),
        ("ERROR: No network", "transformers==9.9.9 cannot be downloaded: ERROR: No network"),
        (
            "ERROR: Could not find a version (from versions: 5.21.0, 5.22.0, 5.23.0)\n"
            "ERROR: No matching distribution found for transformers==9.9.9",
            "there is no release 9.9.9 of transformers",
        ),
    ],
)
def test_pip_fails(monkeypatch: pytest.MonkeyPatch, pip: str, said: str) -> None:
    failed = SimpleNamespace(returncode=1, stderr=pip)
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: failed)
    done = run(["check", "--config", NAME, "--against", "9.9.9"], {})
    assert done.status == 2 and said in done.err and "--against" in done.err


def test_a_download(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "transformers==5.23.0"
        there = Path(command[command.index("--dest") + 1])
        wheel_of(folder / "newer", there / "transformers-5.23.0-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(release.subprocess, "run", pip)
    done = run(["check", "--config", NAME, "--against", "5.23.0"], {})
    assert done.status == 1 and "in 5.23.0" in done.out
