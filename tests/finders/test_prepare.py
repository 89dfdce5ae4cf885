"""A module's patched form without importing it."""

from tests.finders.conftest import TINY

PREPARE = f"""
import json, sys
from veomni_hook import PatchConfig, VeomniHookError
from veomni_hook.locate import locate
from veomni_hook.finders.prepare import prepare
from veomni_hook.finders.settings_in_force import current_settings
TINY = {TINY!r}
def prepared(module, **options):
    return prepare(module, current_settings(), **options)
def show(p):
    return [p.cache, p.stored_path, p.patched is not None, p.reason, "+ 100" in p.stored_text]
"""


def test_nothing_is_imported_and_the_import_hits(python):
    ran = python(
        PREPARE
        + f"""
p = prepared(TINY)
start, end = p.report.applied[0].lines
imported = any(name.startswith("transformers") for name in sys.modules)
import veomni_hook.install, {TINY} as m
outcome = veomni_hook.install.handle.status().modules[TINY]
equal = [p.stored_path == m.__file__, open(m.__file__).read() == p.stored_text, p.patch_hash == outcome.patch_hash,
         json.loads(json.dumps(p.report.to_dict())) == outcome.report]
print(json.dumps([imported, p.cache, outcome.cache, equal, p.stored_text.splitlines()[start - 1 : end]]))
"""
    )
    *found, lines = ran.result
    assert found == [False, "miss", "hit", [True] * 4]
    assert any("def forward" in line for line in lines) and "+ 100" in lines[-1], (
        "lines are the stored file's"
    )


def test_other_modules_and_configs(python):
    """Configs that are given leave the cache alone; what nothing patches, and what is not there."""
    ran = python(
        PREPARE
        + """
config = PatchConfig(TINY)
config.add_post_import_block("X = 1")
found = [show(prepared(TINY, configs=[config])), show(prepared("transformers.models.auto.modeling_auto"))]
try:
    prepared("transformers.models.x.modeling_x")
except VeomniHookError as error:
    found.append(error.what)
found.append([locate(TINY).origin.endswith("modeling_tiny.py"), locate("json.decoder.x") is None,
              locate("transformers.models.namespaced.modeling_namespaced") is not None, "transformers" in sys.modules])
print(json.dumps(found))
"""
    )
    assert ran.result == [
        ["memory", None, True, "the cache is not used if configs are given", False],
        ["", None, False, "no patch applies", False],
        "transformers.models.x.modeling_x cannot be read: it is not installed",
        [True, True, True, False],
    ]
