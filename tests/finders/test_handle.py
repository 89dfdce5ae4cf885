"""Activation and undoing it: handles, contexts, environment, early imports, registration."""

import pytest

from tests.finders.conftest import HOOK, TINY
from tests.processes import outputs, started
from veomni_hook.finders.targets import LAYERS, SHARED, TRAINING

FRESH = f"""
import sys
def fresh():
    for name in [n for n in sys.modules if n.startswith("transformers")]:
        del sys.modules[name]
    from {TINY} import TinyNorm
    return TinyNorm().forward(1)
"""


ACTIVATIONS = {
    "deactivated, once and twice": (
        "handle = activate(); during = fresh(); handle.deactivate(); handle.deactivate()\n"
        "got = [during, fresh(), sys.meta_path == before, handle.status().active]",
        [103, 3, True, False],
    ),
    "a context": (
        "with activate() as handle: inside = [fresh(), handle.status().active]\n"
        "got = [*inside, fresh(), handle.status().active]",
        [103, True, 3, False],
    ),
    "an error in a context": (
        "try:\n    with activate(): raise KeyError\nexcept KeyError: pass\ngot = fresh()",
        3,
    ),
    "nested": (
        "outer = activate(); inner = activate(); got = [len([f for f in sys.meta_path if 'PatchFinder' in repr(f)])]\n"
        "outer.deactivate(); got.append(fresh()); inner.deactivate(); got.append(fresh())",
        [1, 103, 3],
    ),
    "activate() wins over the environment": (
        "import os; os.environ['VEOMNI_HOOK'] = '0'; import veomni_hook.install\n"
        "got = [fresh()]; activate(enabled=True); got.append(fresh())",
        [3, 103],
    ),
}


@pytest.mark.parametrize(("code", "result"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations_and_their_end(python, code, result):
    head = "import json; before = list(sys.meta_path); from veomni_hook import activate\n"
    assert python(f"{FRESH}{head}{code}\nprint(json.dumps(got))").result == result


def test_an_illegal_setting_fails_at_once_and_leaves_nothing(python):
    ran = python(
        "import sys, veomni_hook\nbefore = list(sys.meta_path)\n"
        "try:\n    veomni_hook.activate(kernel='auto')\n"
        "except veomni_hook.VeomniHookError as error:\n    print(error.what, sys.meta_path == before)"
    )
    assert ran.out.strip() == "unknown setting 'kernel' True"


def test_status_tells_what_became_of_each_module(python):
    code = (
        FRESH
        + "import json, veomni_hook.install as i; fresh(); print(json.dumps(i.handle.status().to_dict()))"
    )
    first, second = python(code).result, python(code).result
    assert first["active"] is True
    cold, warm = first["modules"][TINY], second["modules"][TINY]
    assert (cold["patched"], cold["cache"], warm["cache"]) == (True, "miss", "hit")
    assert cold["patch_hash"] == warm["patch_hash"]
    assert cold["stored"] == warm["stored"]
    assert cold["origin"].endswith("modeling_tiny.py")
    assert [p["target"] for p in warm["report"]["applied"]] == ["TinyNorm.forward"]
    assert warm["report"] == cold["report"]


def test_modules_imported_too_early_are_named_with_the_remedy(python):
    code = (
        f"import logging\nlogging.basicConfig(level='INFO')\nimport {TINY}\n"
        f"from veomni_hook import register, PatchConfig\nregister(PatchConfig({TINY!r}))\nprint('on')"
    )
    ran = python(code)
    assert ran.out.strip() == "on"
    assert (
        "AlreadyImportedWarning: imported too early to be patched: tiny. They stay unpatched. Fix:" in ran.err
    )
    assert f"INFO:veomni_hook:imported too early to be patched: {TINY} (" in ran.err
    assert "modeling_tiny.py)" in ran.err and "above the first import of transformers" in ran.err
    strict = python(code, VEOMNI_STRICT="1")
    assert strict.code == 1
    assert "AlreadyImportedError" in strict.err


@pytest.mark.slow
def test_what_all_models_share_is_named_by_what_models_lose():
    """Nobody who has imported a configuration knows `transformers.configuration_utils`."""
    code = "from transformers import AutoConfig, AutoTokenizer\nimport veomni_hook.install"
    _, errors = outputs(started("-c", code, cache="/dev/null"))
    (said,) = (line for line in errors.splitlines() if "AlreadyImportedWarning" in line)
    assert "transformers imported too early. Models lose: under `auto`, kernels for experts and for " in said
    assert "transformers.configuration_utils" not in said and "unpatched" not in said


def test_all_that_models_share_says_what_is_lost():
    for losses in [*SHARED.values(), *LAYERS.values(), *TRAINING.values()]:
        assert losses and not any("transformers." in loss for loss in losses)


def test_early_imports_of_patched_modules_are_noticed_and_no_others(python):
    ran = python(
        f"import {TINY}\n{HOOK}import transformers.models.pair_a.modeling_pair_a as a; print(a.which())"
    )
    assert ran.out.strip() == "patched a" and "imported too early to be patched: tiny." in ran.err
    unpatched = f"import transformers.models.auto.modeling_auto\n{HOOK}print('on')"
    patched = (
        f"{HOOK}from veomni_hook import activate, register\nimport tiny_config\n"
        f"register(tiny_config.config)\nimport {TINY}\nactivate(); print('on')"
    )
    for code, patches in ((unpatched, "tiny_config"), (patched, None)):
        ran = python(code, VEOMNI_PATCHES=patches)
        assert (ran.out.strip(), ran.err) == ("on", "")


def test_the_log_counts_the_patches(python):
    ran = python(f"import logging\nlogging.basicConfig(level='INFO')\n{HOOK}import {TINY}")
    assert f"INFO:veomni_hook:patched {TINY} (1 patch)" in ran.err.splitlines()


def test_strict_activation_that_fails_is_undone(python):
    ran = python(
        f"""
import sys, {TINY}, veomni_hook
from veomni_hook import PatchConfig, register
try:
    register(PatchConfig({TINY!r}))
except veomni_hook.VeomniHookError: pass
try:
    veomni_hook.activate(strict=True)
except veomni_hook.VeomniHookError as error:
    print(type(error).__name__, any("PatchFinder" in repr(f) for f in sys.meta_path))
""",
        VEOMNI_STRICT="1",
    )
    assert ran.out.strip() == "AlreadyImportedError False", ran.err


def test_a_registered_config_applies_and_is_part_of_the_key(python):
    code = f"""
import sys, veomni_hook.install
from veomni_hook import PatchConfig, register
config = PatchConfig({TINY!r})
config.add_post_import_block("VALUE = " + sys.argv[1])
register(config)
import {TINY} as m
print(m.VALUE)
"""
    assert [python(code, value, VEOMNI_PATCHES=None).result for value in "1221"] == [1, 2, 2, 1]


def test_register_reaches_modules_outside_transformers(python):
    ran = python(
        f"{HOOK}from veomni_hook import PatchConfig, register\nconfig = PatchConfig('tables')\n"
        "config.add_post_import_block('ADDED = BONUS + 1')\nregister(config)\nimport tables"
    )
    assert ran.code == 1, "BONUS is defined after the import block"
    assert "NameError" in ran.err and "tables.py" in ran.err


def test_registering_something_else_is_an_error(python):
    ran = python(
        "import veomni_hook, json\n"
        "for thing in (3, json):\n"
        "    try:\n        veomni_hook.register(thing)\n"
        "    except veomni_hook.VeomniHookError as error: print(error.what)"
    )
    assert ran.out.splitlines() == ["int object is not a patch config", "the module has no patch config"]


def test_a_late_import_in_a_notebook_asks_for_a_restart(python):
    """Two stand-ins: IPython's function, and a shell whose class is one of ipykernel's."""
    ran = python(
        f"""
import sys, types, {TINY}
kind = type("Shell", (type("ZMQInteractiveShell", (), {{"__module__": "ipykernel.zmqshell"}}),), {{}})
shell = None
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
from veomni_hook import activate
for shell in (None, object(), kind()):
    activate().deactivate()
""",
        flags=("-Walways",),
    )
    terminal, other, notebook = [line for line in ran.err.splitlines() if "Fix: " in line]
    assert "veomni-hook run" in terminal and terminal == other
    assert "Fix: restart the kernel and run `import veomni_hook.install`" in notebook
    assert "veomni-hook run" not in notebook


def test_the_kernel_choice_of_an_activation_reaches_loaded_modules_and_is_undone(python):
    ran = python(
        f"""
import json, {TINY.rpartition(".")[0]}
from veomni_hook import VeomniHookError, activate
outer = activate()
import {TINY}
from veomni_hook.kernels.selection.process_choice import STATE
got = [str(STATE.choice)]
with activate(kernels="eager"):
    got.append(str(STATE.choice))
got.append(str(STATE.choice))
try:
    activate(kernels="rms_nrm=torch")
except VeomniHookError as error:
    got.append([type(error).__name__, str(STATE.choice)])
outer.deactivate()
print(json.dumps([*got, STATE.active]))
"""
    )
    assert ran.result == ["auto", "eager", "auto", ["KernelError", "auto"], False], ran.err
