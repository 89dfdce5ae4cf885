"""Errors of users' patches, as Python prints them: the user's frames, one of ours, and the declaring line."""

import re

from tests.finders.conftest import DATA, ROOT, TINY

SCRIPT = f"import veomni_hook.install\ndef load():\n    import {TINY}\nload()"
MISSPELT = DATA / "configs" / "misspelt_config.py"


def files(ran):
    """The files of the frames that were printed."""
    assert ran.code == 1
    return re.findall(r'^  File "([^"]+)"', ran.err, re.MULTILINE)


def ours(ran):
    """How many of them are this package's."""
    return sum(path.startswith(str(ROOT / "veomni_hook")) for path in files(ran))


def test_a_patch_that_does_not_apply(python):
    ran = python(SCRIPT, VEOMNI_PATCHES="misspelt_config")
    assert ours(ran) == 1, ran.err
    assert files(ran)[:2] == ["<string>", "<string>"], "the user's own"
    assert f"declared in {MISSPELT}:8 (misspelt_config:config)\n" in ran.err, "the decorator's line"
    assert "VEOMNI_TRACEBACK=full" in ran.err
    assert "During handling" not in ran.err and "direct cause" not in ran.err
    full = python(SCRIPT, VEOMNI_PATCHES="misspelt_config", VEOMNI_TRACEBACK="full")
    assert ours(full) > 5
    assert full.err.splitlines()[-3:] == ran.err.splitlines()[-3:], "the message is the same"


def test_the_setting_may_come_from_the_script_and_an_illegal_one_is_folded(python):
    full = "import veomni_hook as v; v.activate(traceback='full')"
    script = SCRIPT.replace("import veomni_hook.install", full)
    assert ours(python(script, VEOMNI_PATCHES="misspelt_config")) > 5
    ran = python(SCRIPT, VEOMNI_DEVICE="tpu")
    assert "SettingsError" in ran.err and ours(ran) == 1
    assert ours(python(SCRIPT, VEOMNI_DEVICE="tpu", VEOMNI_TRACEBACK="full")) > 1


def test_a_config_that_fails_shows_its_own_frames_as_the_cause(python):
    ran = python(SCRIPT, VEOMNI_PATCHES="broken_config")
    config = str(DATA / "configs" / "broken_config.py")
    cause, _, error = ran.err.partition("direct cause")
    assert ours(ran) == 1 and re.findall(r'File "([^"]+)"', cause) == [config], ran.err
    assert f"where: config module broken_config, {config}:3" in error


def test_a_strict_activation_is_folded_as_well(python):
    ran = python(f"import {TINY}\n{SCRIPT}", VEOMNI_STRICT="1")
    assert "AlreadyImportedError" in ran.err
    assert ours(ran) == 2, "veomni_hook.install and one line more"


def test_a_defect_of_ours_keeps_its_frames(python):
    fails = f"import thousand; thousand.install(thousand.fail)\n{SCRIPT.replace(TINY, TINY.replace('tiny', 'scaled'))}"
    ran = python(fails, VEOMNI_PATCHES=None, VEOMNI_STRICT="1")
    assert "IdiomError" in ran.err and "a defect" in ran.err
    assert ours(ran) > 5
