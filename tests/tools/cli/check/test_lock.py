from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.patches import fake_idiom
from veomni_hook.patches.idioms import recognise
from veomni_hook.tools.cli.app import app
from veomni_hook.tools.cli.check import lock
from veomni_hook.tools.cli.inputs import sources

NORM = "class {name}:\n    def forward(self, x):\n        return self.scale * x\n\n\n"
TINY = "transformers.models.tiny.modeling_tiny"

Check = Callable[..., Result]


class Installed:
    """A transformers package that tests upgrade."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "transformers"
        self.release("5.1.0")
        for family in ("tiny", "other"):
            (self.folder / "models" / family).mkdir(parents=True)
            self.file(family).write_text(NORM.format(name=f"{family.title()}Norm"))

    def file(self, family: str) -> Path:
        return self.folder / "models" / family / f"modeling_{family}.py"

    def release(self, version: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "__init__.py").write_text(f'__version__ = "{version}"\n')

    def edit(self, family: str, old: str, new: str) -> None:
        text = self.file(family).read_text()
        assert old in text
        self.file(family).write_text(text.replace(old, new))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    monkeypatch.setattr(recognise, "idioms", lambda *_: (fake_idiom.module(),))
    monkeypatch.setattr("veomni_hook.patches.models.all_spec_modules", list)
    made = Installed(tmp_path / "site")
    monkeypatch.setattr(sources, "transformers_folder", lambda: str(made.folder))
    return made


@pytest.fixture
def check(installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run `veomni-hook check` in a project's folder, without any config."""
    (tmp_path / "project" / "src").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["check", *arguments], env={"VEOMNI_PATCHES": ""})

    return run


def recorded() -> dict[str, list[str]]:
    content = json.loads(Path(lock.NAME).read_text())
    return {name: [site["target"] for site in held["sites"]] for name, held in content["modules"].items()}


def test_the_lock_records_all_families_or_those_named(check: Check, installed: Installed) -> None:
    (installed.file("tiny").parent / "modeling_bare.py").write_text("x = 1\n")
    done = check("--write-lock")
    assert done.exit_code == 0 and "2 routed sites and 0 overridden bodies in 2 modules" in done.stderr
    assert {*recorded()} == {TINY, "transformers.models.other.modeling_other"}
    assert check("--write-lock", "tiny").exit_code == 0
    assert recorded() == {TINY: ["TinyNorm.forward"]}


def test_a_lock_that_nobody_named_is_not_written_through_another_users_link(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Path(lock.NAME)
    link.symlink_to(tmp_path / "absent")
    if os.geteuid() == 0:
        os.chown(link, 4242, 4242, follow_symlinks=False)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    done = check("--write-lock")
    assert done.exit_code != 0
    assert "belongs to user" in done.stderr or "belongs to user" in str(done.exception)
    assert not (tmp_path / "absent").exists()
    assert check("--write-lock", "--lock", lock.NAME).exit_code == 0
    assert (tmp_path / "absent").exists()


def test_written_again_it_has_the_families_that_it_had(check: Check, installed: Installed) -> None:
    check("--write-lock", "tiny")
    installed.file("tiny").write_text(NORM.format(name="New"))
    check("--write-lock")
    assert recorded() == {TINY: ["New.forward"]}


def test_nothing_changed(check: Check) -> None:
    check("--write-lock")
    done = check()
    assert done.exit_code == 0
    assert done.stdout.endswith("veomni-hook.lock (transformers 5.1.0, now 5.1.0)\n2 recorded\n")
    assert json.loads(check("--json").stdout) == []


def test_without_idioms_nothing_stands_on_what_they_would_route(
    check: Check, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("--write-lock")
    installed.edit("tiny", "*", "+")
    assert check().exit_code == 1
    monkeypatch.setenv("VEOMNI_IDIOMS", "0")
    done = check()
    assert done.exit_code == 0 and done.stdout.endswith("0 recorded\n")
    assert "0 routed sites and 0 overridden bodies" in check("--write-lock").stderr


def test_a_formula_that_changed_is_told_with_the_diff(check: Check, installed: Installed) -> None:
    check("--write-lock")
    installed.release("5.2.0")
    installed.edit("tiny", "*", "+")
    done = check()
    assert done.exit_code == 1
    assert "veomni-hook.lock (transformers 5.1.0, now 5.2.0)" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("formula changed "))
    assert "scaling  tiny: TinyNorm.forward  it was times and is plus" in row
    assert "-    return self.scale * x\n+    return self.scale + x\n" in done.stdout
    assert "2 recorded, 1 formula changed\nfix: read the diff" in done.stdout
    (found,) = json.loads(check("--json").stdout)
    assert {**found, "diff": "", "detail": ""} == {
        "module": TINY,
        "device": "any",
        "config": "veomni-hook.lock",
        "kind": "scaling",
        "target": "TinyNorm.forward",
        "verdict": "formula changed",
        "detail": "",
        "fix": lock.FIX,
        "matters": True,
        "diff": "",
    }


def test_what_does_not_matter_is_a_note(check: Check, installed: Installed) -> None:
    check("--write-lock")
    installed.edit("tiny", "return self.scale * x", "y = self.scale * x\n        return y")
    installed.file("other").write_text("# moved\n" + installed.file("other").read_text())
    done = check()
    assert done.exit_code == 0
    assert "only text changed" in done.stdout and "+    y = self.scale * x" not in done.stdout
    assert done.stdout.endswith("2 recorded, 1 other line, 1 only text changed\n")
    assert "+    y = self.scale * x" in check("--diffs").stdout


def test_a_family_that_is_gone(check: Check, installed: Installed) -> None:
    check("--write-lock", "tiny")
    installed.file("tiny").unlink()
    done = check()
    assert done.exit_code == 1 and "the module is not there" in done.stdout


def test_targets_narrow_the_comparison(check: Check, installed: Installed) -> None:
    check("--write-lock")
    installed.edit("tiny", "*", "+")
    assert json.loads(check("--json", "other").stdout) == []
    assert [one["module"] for one in json.loads(check("--json", "tiny").stdout)] == [TINY]


def test_the_nearest_lock_upward_or_the_one_given(
    check: Check, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("--write-lock", "--lock", "mine.json")
    assert "recorded" not in check().stdout
    check("--write-lock")
    installed.edit("tiny", "*", "+")
    monkeypatch.chdir("src")
    assert check().exit_code == 1
    assert check("--lock", "../mine.json").exit_code == 1
    check("--write-lock", "--lock", "../mine.json")
    assert check("--lock", "../mine.json").exit_code == 0
    assert check().exit_code == 1


@pytest.mark.parametrize("text", [None, "nonsense", '{"schema": 99}', b"\xff"])
def test_a_lock_that_cannot_be_read_is_wrong_use(check: Check, text: str | bytes | None) -> None:
    if text is not None:
        Path("some.lock").write_bytes(text.encode() if isinstance(text, str) else text)
    done = check("--lock", "some.lock")
    assert done.exit_code == 2 and "some.lock" in done.stderr and "fix:" in done.stderr


def test_a_lock_that_cannot_be_written_is_wrong_use(check: Check) -> None:
    done = check("--write-lock", "--lock", "no/such/folder.lock")
    assert done.exit_code == 2 and "cannot be written" in done.stderr


def test_a_module_that_fails_is_named_and_hides_nothing(check: Check, installed: Installed) -> None:
    check("--write-lock")
    installed.edit("other", "self.scale * x", "boom")
    installed.edit("tiny", "*", "+")
    done = check("--json")
    assert done.exit_code == 1
    assert [one["module"] for one in json.loads(done.stdout)] == [TINY]
    assert "met boom" in done.stderr
    before = Path(lock.NAME).read_text()
    assert check("--write-lock").exit_code == 1 and Path(lock.NAME).read_text() == before


def test_a_family_that_does_not_exist_is_wrong_use(check: Check) -> None:
    done = check("--write-lock", "tinny")
    assert done.exit_code == 2 and not Path(lock.NAME).exists()


def test_the_diff_of_a_definition_that_several_sites_use_is_shown_once(
    check: Check, installed: Installed
) -> None:
    helper = "def helper(x):\n    return x * 2\n\n\n"
    uses = NORM.replace("* x", "* helper(x)")
    installed.file("tiny").write_text(helper + uses.format(name="One") + uses.format(name="Two"))
    check("--write-lock", "tiny")
    installed.edit("tiny", "* 2", "* 3")
    done = check("--diffs")
    assert done.stdout.count("+    return x * 3") == 1 and done.stdout.count("shown above") == 1
    assert all("+    return x * 3" in change["diff"] for change in json.loads(check("--json").stdout))


def test_one_row_for_a_renamed_parameter_and_for_changes_that_are_alike(
    check: Check, installed: Installed
) -> None:
    said = "from ...utils.deprecation import deprecate_kwarg\n\n\n"
    for family in ("tiny", "other"):
        text = installed.file(family).read_text().replace("x):", "x, past=None):")
        installed.file(family).write_text(said + text + text.replace("Norm", "SecondNorm"))
    check("--write-lock")
    installed.release("5.24.0")
    for family in ("tiny", "other"):
        decorator = '@deprecate_kwarg("past", "5.40.0", new_name="cache")'
        installed.edit(family, "    def forward", f"    {decorator}\n    def forward")
        installed.edit(family, "past=None", "cache=None")
        installed.edit(family, "x\n\n\nclass", "(y := x)\n\n\nclass")
    done = check()
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()[4:-2]]
    assert done.exit_code == 0 and rows == [
        "renamed parameter past past is cache now in 4 signatures; the old keyword still works until 5.40",
        "only text changed scaling other: OtherNorm.forward and 1 more what is routed computes the same",
    ]
    assert done.stdout.endswith("4 recorded, 1 renamed, 2 only text changed, 2 other line\n")
    (row,) = [one for one in json.loads(check("--json").stdout) if one["kind"] == "parameter"]
    assert (row["module"], row["target"], row["verdict"]) == ("transformers.models", "past", "renamed")
