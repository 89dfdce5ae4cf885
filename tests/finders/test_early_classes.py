"""Modules that were imported before the hook: told when a class of them is used."""

import pytest

from tests.finders.conftest import TINY

EARLY = f"""
import logging, sys, torch, {TINY} as tiny
logging.basicConfig(level="INFO")
class Part(torch.nn.Module):
    __module__ = tiny.__name__
tiny.Part = Part
class Child(Part):
    pass
"""
INSTALL = "import veomni_hook.install\nprint('installed', file=sys.stderr)\n"
TOO_EARLY = "AlreadyImportedWarning: imported too early to be patched: tiny."
HOOKS = "print(len(torch.nn.modules.module._global_module_registration_hooks))\n"


def test_a_module_of_which_nothing_is_used_is_in_the_log_alone(python):
    ran = python(EARLY + INSTALL + "torch.nn.Sequential(torch.nn.Linear(1, 1)); print('on')")
    assert ran.out == "on\n" and "Warning" not in ran.err
    assert f"INFO:veomni_hook:imported too early to be patched, and not used yet: {TINY}" in ran.err


@pytest.mark.parametrize(
    "use",
    ["torch.nn.Sequential(Part())", "Part().inner = torch.nn.Linear(1, 1)", "torch.nn.ModuleList([Child()])"],
    ids=["child", "parent", "subclass"],
)
def test_the_first_module_object_of_it_is_told_once(python, use):
    ran = python(EARLY + INSTALL + f"print('use', file=sys.stderr)\n{use}\n{use}\n{HOOKS}")
    before, after = ran.err.split("use\n")
    assert TOO_EARLY not in before and after.count(TOO_EARLY) == 1 and "veomni_hook.adopt(model)" in after
    assert ran.out == "0\n", "torch asks no longer"


def test_an_object_that_exists_is_told_at_once(python):
    ran = python(EARLY + "model = torch.nn.Sequential(Child())\n" + INSTALL)
    assert TOO_EARLY in ran.err.split("installed")[0]


def test_strict_the_first_module_object_is_an_error(python):
    ran = python(EARLY + INSTALL + "torch.nn.Sequential(Part())", VEOMNI_STRICT="1")
    assert "installed" in ran.err and "AlreadyImportedError" in ran.err.split("installed")[1]


def test_deactivated_nothing_is_told(python):
    ran = python(
        EARLY + INSTALL + "veomni_hook.install.handle.deactivate()\ntorch.nn.Sequential(Part())\n" + HOOKS
    )
    assert TOO_EARLY not in ran.err and ran.out == "0\n"
