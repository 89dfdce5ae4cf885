"""Loading configs: those that import what they patch, errors, entry points, and what makes an entry stale."""

from __future__ import annotations

import shutil

import pytest

from tests.finders.conftest import DATA, HERE, HOOK, SHOW, TINY, config_of


def test_a_config_may_import_the_module_that_it_patches(python):
    code = f"""
import json, sys, veomni_hook.install
from transformers import TinyNorm, TinyModel
import {TINY} as m
print(json.dumps([TinyNorm().forward(1), TinyModel().norm.forward(1), m.TinyNorm is TinyNorm, m.__file__.count("5.99.0")]))
"""
    for _ in range(2):
        assert python(code, VEOMNI_PATCHES="importing_config").result == [103, 103, True, 1]


def test_modules_that_no_config_is_for_are_imported_once(python, tmp_path):
    """While a config loads, too: whatever else it imports keeps their classes."""
    held = "import transformers.modeling_layers as layers, transformers.models.scaled.modeling_scaled as scaled\n"
    override = "@config.override_method('TinyNorm.forward')\ndef forward(self, x):\n    return 103"
    (tmp_path / "holding_config.py").write_text(held + config_of(override))
    same = "[module is sys.modules[module.__name__] for module in (config.layers, config.scaled)]"
    code = f"{HOOK}import json, sys\n{SHOW}\nimport holding_config as config\nprint(json.dumps({same}))"
    ran = python(code, VEOMNI_PATCHES="holding_config")
    assert ran.result == [True, True] and ran.out.startswith("103")


def test_a_config_module_imported_first_by_the_user_does_not_leave_upstream_behind_silently(python):
    """The config's own import comes before the hook knows of it, so the module is patched by that import."""
    ran = python(f"{HOOK}import tiny_config\n{SHOW}")
    assert ran.out.strip() == "103", ran.err


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (
            "broken_config",
            ("ConfigError", "broken_config", "RuntimeError: this config is broken", "VEOMNI_PATCHES"),
        ),
        ("tiny_config:confg", ("tiny_config has no attribute 'confg'",)),
    ],
)
def test_a_broken_config_or_a_missing_attribute_is_named(python, config, parts):
    ran = python(HOOK + SHOW, VEOMNI_PATCHES=config)
    assert ran.code == 1 and [part for part in parts if part not in ran.err] == []


def test_an_attribute_selects_one_config(python):
    code = "import veomni_hook.install, json, transformers.models.pair_a.modeling_pair_a as a; print(json.dumps(a.both()))"
    assert python(code, VEOMNI_PATCHES="tiny_config:pair_b").result == ["upstream a", "patched b"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("changed", ["tables.py", "table_config.py"])
def test_a_changed_config_or_sibling_makes_the_entry_stale(python, tmp_path, changed):
    for name in ("tables.py", "table_config.py"):
        shutil.copy(DATA / "configs" / name, tmp_path / name)
    code = f"{HERE}{HOOK}{SHOW}\nprint(veomni_hook.install.handle.status())"

    def run() -> list[str]:
        ran = python(code, VEOMNI_PATCHES="table_config")
        assert ran.code == 0, ran.err
        return [ran.out.split()[0], "hit" if "patched (hit)" in ran.out else "miss"]

    assert [run(), run()] == [["10", "miss"], ["10", "hit"]]
    path = tmp_path / changed
    text = path.read_text()
    path.write_text(text.replace("BONUS = 7", "BONUS = 8").replace("+ BONUS", "+ 2 * BONUS"))
    expected = "11" if changed == "tables.py" else "17"
    assert [run(), run()] == [[expected, "miss"], [expected, "hit"]]


@pytest.mark.parametrize(
    "what", [SHOW, "import transformers.models.auto.modeling_auto"], ids=["hit", "nothing applies"]
)
def test_what_is_stored_loads_no_config(python, what):
    look = "print(json.dumps([n in sys.modules for n in ('tiny_config', 'veomni_hook.patches.engine')]))"
    code = f"{HOOK}import sys, json\n{what}\n{look}"
    cold, warm = (python(code).result for _ in range(2))
    assert cold[0] is True and warm == [False, False]


def test_two_projects_with_configs_of_one_name_share_no_entry(python, tmp_path):
    for project in ("one", "two"):
        (tmp_path / project).mkdir()
        block = f"PROJECT = {project!r}"
        (tmp_path / project / "mine.py").write_text(config_of(f"config.add_post_import_block({block!r})"))
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import veomni_hook.install, json, {TINY} as m; print(json.dumps(m.PROJECT))"
    ran = [python(code, project, VEOMNI_PATCHES="mine").result for project in ("one", "two", "one")]
    assert ran == ["one", "two", "one"]


def test_configs_that_import_each_other_are_an_error_that_names_them(python, tmp_path):
    for name, other in (("one_config", "other_config"), ("other_config", "one_config")):
        (tmp_path / f"{name}.py").write_text(
            f"from {other} import config as taken\nfrom veomni_hook import PatchConfig\n"
            f'config = PatchConfig("{TINY}", base=taken)\n'
        )
    ran = python(HERE + HOOK + SHOW, VEOMNI_PATCHES="one_config")
    assert ran.code == 1 and "ConfigError: the patch config one_config cannot be imported" in ran.err
    assert "circular import" in ran.err and "RecursionError" not in ran.err
