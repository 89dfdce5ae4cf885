"""A module's patched form without importing it."""

from tests.finders.conftest import TINY

PREPARE = """
import json, sys
from veomni_hook.locate import locate
from veomni_hook.finders.prepare import prepare
from veomni_hook.finders.settings_in_force import current_settings
def show(p):
    return [p.cache, p.stored_path, p.patched is not None, p.reason, "+ 100" in p.stored_text]
"""


def test_nothing_is_imported_and_the_import_hits(python):
    ran = python(
        PREPARE
        + f"""
p = prepare({TINY!r}, current_settings())
assert not any(name.startswith("transformers") for name in sys.modules)
import veomni_hook.install, {TINY} as m
outcome = veomni_hook.install.handle.status().modules[m.__name__]
print(json.dumps([p.cache, outcome.cache, p.stored_path == m.__file__, open(m.__file__).read() == p.stored_text, p.patch_hash == outcome.patch_hash, json.loads(json.dumps(p.report.to_dict())) == outcome.report]))
"""
    )
    assert ran.result == ["miss", "hit", True, True, True, True]


def test_the_reports_lines_are_the_stored_files(python):
    ran = python(
        PREPARE
        + f"""
p = prepare({TINY!r}, current_settings())
start, end = p.report.applied[0].lines
print(json.dumps("\\n".join(p.stored_text.splitlines()[start - 1 : end])))
"""
    )
    lines = ran.result.splitlines()
    assert any("def forward" in line for line in lines)
    assert "+ 100" in lines[-1]


def test_explicit_configs_leave_the_cache_alone(python):
    ran = python(
        PREPARE
        + f"""
from veomni_hook import PatchConfig
config = PatchConfig({TINY!r})
config.add_post_import_block("X = 1")
print(json.dumps(show(prepare({TINY!r}, current_settings(), configs=[config]))))
"""
    )
    assert ran.result == ["memory", None, True, "the cache is not used if configs are given", False]


def test_a_module_that_nothing_patches(python):
    ran = python(
        PREPARE
        + "print(json.dumps(show(prepare('transformers.models.auto.modeling_auto', current_settings()))))"
    )
    assert ran.result == ["", None, False, "no patch applies", False]


def test_a_module_that_does_not_exist(python):
    ran = python(
        PREPARE
        + "from veomni_hook import VeomniHookError\n"
        + "try:\n    prepare('transformers.models.x.modeling_x', current_settings())\n"
        + "except VeomniHookError as error: print(error.what)"
    )
    assert ran.out.strip() == "transformers.models.x.modeling_x cannot be read: it is not installed"


def test_locate_imports_no_package(python):
    ran = python(
        PREPARE
        + f"print(json.dumps([locate({TINY!r}).origin.endswith('modeling_tiny.py'), locate('json.decoder.x') is None,"
        + " locate('transformers.models.namespaced.modeling_namespaced') is not None, 'transformers' in sys.modules]))"
    )
    assert ran.result == [True, True, True, False]
