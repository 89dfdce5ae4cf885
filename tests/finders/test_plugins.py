"""Configs that installed distributions announce: in force or not, and contained where they fail."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from tests.finders.conftest import DATA, HOOK, ROOT, SHOW, TINY, Ran, config_of

PAIR = "from transformers.models.pair_a.modeling_pair_a import which; print(which())"
CODE = f"{HOOK}{SHOW}\n{PAIR}\nimport transformers.models.scaled.modeling_scaled"
Run = Callable[..., Ran]


@pytest.fixture
def installed(python, tmp_path):
    """Run code where distributions announce config modules: `name=value` each, a module's text with it."""
    site = tmp_path / "site"

    def run(code: str, *announced: tuple[str, str, str], **variables: str | None) -> Ran:
        for name, value, text in announced:
            info = site / f"{name}-1.0.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[veomni_hook.patches]\n{name}-patches = {value}\n")
            if text:
                (site / f"{value.partition(':')[0]}.py").write_text(text)
        path = os.pathsep.join(map(str, (site, DATA / "hub", DATA / "configs", ROOT)))
        return python(code, **{"PYTHONPATH": path, "VEOMNI_PATCHES": None, **variables})

    return run


GOOD = ("Good.Dist", "tiny_config", "")
FAILING = ("bad", "bad_config", "raise RuntimeError('broken')\n")
EXITING = ("bad", "bad_config", "raise SystemExit(3)\n")
MAIN = "import sys\nfrom veomni_hook.tools.cli.app import main\nsys.argv[0] = 'veomni-hook'\nsys.argv[1:] = {!r}; main()"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('broken')\n", "RuntimeError: broken"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("import sys; sys.exit()\n", "SystemExit"),
        ("import nowhere_at_all\n", "ModuleNotFoundError"),
        ("def (\n", "SyntaxError"),
        ("class Stop(BaseException): pass\nraise Stop('a skip')\n", "Stop: a skip"),
        ("value = 1\n", "has no patch config"),
        ("config = 3\n", "is not a patch config"),
    ],
)
def test_one_that_fails_is_named_once_and_everything_else_goes_on(installed, text, said):
    ran = installed(CODE, GOOD, ("bad", "bad_config", text))
    assert ran.out == "103\npatched a\n", ran.err
    assert ran.err.count("is left out of this process") == 1
    assert "entry point 'bad-patches' of bad (veomni_hook.patches)" in ran.err and said in ran.err
    assert "VEOMNI_PLUGINS=0" in ran.err


@pytest.mark.slow
def test_it_is_an_error_under_strict_and_nothing_of_it_is_kept(installed):
    strict = installed(CODE, GOOD, EXITING, VEOMNI_STRICT="1")
    assert strict.code == 1
    assert "of bad (veomni_hook.patches)" in strict.err and "SystemExit: 3" in strict.err
    for _ in range(2):
        assert installed(CODE).err.count("is left out") == 1
    ran = installed(CODE, ("bad", "bad_config", config_of()))
    assert (ran.out, ran.err) == ("103\npatched a\n", "")


def test_an_interrupt_passes(installed):
    ran = installed(f"{HOOK}{SHOW}", ("bad", "bad_config", "raise KeyboardInterrupt\n"))
    assert ran.code != 0 and "KeyboardInterrupt" in ran.err and "left out" not in ran.err


def test_what_is_stored_without_it_is_what_a_process_without_plugins_stores(installed):
    look = f"{HOOK}{SHOW}\nprint(veomni_hook.install.handle.status())"
    first = installed(look, FAILING, VEOMNI_PATCHES="tiny_config")
    assert "patched (miss)" in first.out, first.err
    assert "patched (hit)" in installed(look, VEOMNI_PATCHES="tiny_config", VEOMNI_PLUGINS="0").out
    again = installed(look, VEOMNI_PATCHES="tiny_config")
    assert "patched (hit)" in again.out and "is left out" in again.err


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("plugins", "shown"),
    [
        (None, "103"), ("1", "103"), ("all", "103"), ("0", "3"), ("none", "3"), ("good_dist", "103"),
        ("Good.Dist-patches", "103"), ("bad", "3"), ("bad, good-dist", "103"),
    ],
)  # fmt: skip
def test_the_setting_says_which_are_in_force(installed, plugins, shown):
    bad = ("bad", "bad_config", "import builtins; builtins.BAD = 1\nconfigs = []\n")
    code = f"{HOOK}{SHOW}\nimport builtins; print(hasattr(builtins, 'BAD'))"
    ran = installed(code, GOOD, bad, VEOMNI_PLUGINS=plugins)
    loaded = plugins in (None, "1", "all") or "bad" in (plugins or "")
    assert ran.out == f"{shown}\n{loaded}\n", ran.err
    assert ran.err == ""
    if shown == "3":  # what is in force is part of the key: another process gets its own
        assert installed(f"{HOOK}{SHOW}").out == "103\n"


def test_an_activation_and_a_settings_file_say_it_too(installed, tmp_path):
    assert installed(f"import veomni_hook; veomni_hook.activate(plugins=[])\n{SHOW}", GOOD).out == "3\n"
    for text, shown in (('["good-dist"]', "103\n"), ("false", "3\n")):
        (tmp_path / "veomni-hook.toml").write_text(f"plugins = {text}\n")
        assert installed(f"{HOOK}{SHOW}").out == shown
    (tmp_path / "script.py").write_text(f"import os; os.chdir('/')\n{SHOW}\n")
    child = (
        "import subprocess, sys; subprocess.run([sys.executable, '-m', 'veomni_hook', 'run', 'script.py'])"
    )
    assert installed(child).out == "3\n"


def test_a_name_that_nothing_has_is_said(installed):
    ran = installed(f"{HOOK}{SHOW}", GOOD, VEOMNI_PLUGINS="god.dist,Good.Dist")
    assert ran.out == "103\n"
    assert ran.err.count("names god-dist, but no installed distribution") == 1
    strict = installed(f"{HOOK}{SHOW}", GOOD, VEOMNI_PLUGINS="god.dist", VEOMNI_STRICT="1")
    assert strict.code == 1 and "SettingsError" in strict.err


def test_a_patch_of_theirs_that_does_not_apply_names_them(installed):
    override = "@config.override_method('TinyNrom.forward')\ndef forward(self, x):\n    return x"
    ran = installed(f"{HOOK}{SHOW}", ("bad", "bad_config", config_of(override)))
    assert ran.code == 1
    assert "PatchTargetError" in ran.err and "TinyNorm" in ran.err
    assert "of bad (veomni_hook.patches), which VEOMNI_PLUGINS=0 leaves out" in ran.err
    assert installed(f"{HOOK}{SHOW}", VEOMNI_PLUGINS="0").out == "3\n"


def test_one_that_the_settings_name_as_well_is_the_users_own_error(installed):
    ran = installed(f"{HOOK}{SHOW}", EXITING, VEOMNI_PATCHES="bad_config")
    assert ran.code == 1 and "ConfigError" in ran.err and "VEOMNI_PATCHES" in ran.err


def test_the_dump_and_the_command_line_go_on_as_well(installed, tmp_path):
    ran = installed(f"{HOOK}{SHOW}", GOOD, FAILING, VEOMNI_DUMP_PATCHED="1")
    assert ran.out == "103\n" and ran.err.count("is left out") == 1
    assert (tmp_path / "veomni_patched" / "models" / "tiny" / "modeling_tiny.py").exists()
    ran = installed(MAIN.format(["dump", TINY]))
    assert "+ 100" in ran.out and "is left out" in ran.err


@pytest.mark.sample(1)
@pytest.mark.parametrize("fast", [True, False])
def test_doctor_lists_them(installed, fast):
    doctor = MAIN.format(["doctor", "--json", *(["--fast"] if fast else [])])
    found = json.loads(installed(doctor, GOOD, FAILING).out)
    rows = {row["distribution"]: row for row in found["plugins"]}
    assert rows["Good.Dist"] == {
        "plugin": "Good.Dist-patches",
        "distribution": "Good.Dist",
        "announces": "tiny_config",
        "group": "veomni_hook.patches",
        "state": "in force",
    }
    assert ("broken" in rows["bad"]["state"]) == (not fast)
    assert any("of bad (veomni_hook.patches)" in problem for problem in found["problems"]) == (not fast)
    off = json.loads(installed(doctor, VEOMNI_PLUGINS="good-dist,god").out)
    assert [row["state"] for row in off["plugins"]] == ["switched off", "in force"]
    assert any("names god:" in problem for problem in off["problems"])
