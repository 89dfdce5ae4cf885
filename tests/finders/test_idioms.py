"""Every modeling module goes through the idioms: what is found is patched, that nothing is found is remembered."""

import json

import pytest

from tests.finders.conftest import HERE, TINY, config_of

SCALED = "transformers.models.scaled.modeling_scaled"
STILL = "transformers.models.still.modeling_still"
LAYERS = "transformers.modeling_layers"
QUIET = "import veomni_hook.install\n"
HOOK = f"import thousand; thousand.install(); {QUIET}"
BOTH = f"import {SCALED} as m; print(m.Scaled().forward(1), m.Other().forward(1))"
LOOK = """
import json, sys
def look(*names):
    import importlib
    for name in names:
        importlib.import_module(name)
    outcomes = veomni_hook.install.handle.status().modules
    found = {n: [o.patched, o.cache, [p["kind"] for p in o.report.get("applied", ())]] for n, o in outcomes.items() if n in names}
    print(json.dumps([found, "veomni_hook.patches.engine" in sys.modules]))
"""


def test_a_module_that_no_config_names_is_patched(python):
    assert python(HOOK + BOTH, VEOMNI_PATCHES=None).out.split() == ["1002", "2"]
    assert python(BOTH, VEOMNI_PATCHES=None).out.split() == ["2", "2"]


@pytest.mark.parametrize("names", [(SCALED, STILL, LAYERS), ("transformers.models.auto.modeling_auto", TINY)])
def test_what_idioms_found_or_not_is_remembered(python, names):
    """A warm import recognises nothing; of what does not compute with tensors, a cold one neither."""
    code = f"{LOOK}look(*{names})"
    asked = SCALED in names
    for hook, cache, engine in ((HOOK if asked else QUIET, "miss", asked), (QUIET, "hit", False)):
        found = {
            name: [True, cache, ["route"]] if name in (SCALED, LAYERS) else [False, "", []] for name in names
        }
        assert python(hook + code, VEOMNI_PATCHES=None).result == [found, engine]


@pytest.mark.slow
def test_the_setting_turns_them_off_and_is_part_of_the_key(python):
    code = f"{HOOK}import {SCALED} as m; print(m.Scaled().forward(1))"
    got = [python(code, VEOMNI_PATCHES=None, VEOMNI_IDIOMS=idioms).result for idioms in ("1", "0", "1", "0")]
    assert got == [1002, 2, 1002, 2]
    got = [python(code, VEOMNI_IDIOMS=idioms).result for idioms in ("1", "0", "1")]
    assert got == [1002, 2, 1002], "beside configs of the user's"


@pytest.mark.slow
@pytest.mark.parametrize(("defect", "said"), [("fail", "a defect"), ("garble", "the idioms of scaling")])
def test_a_failing_idiom_is_a_warning_an_error_under_strict_and_leaves_nothing(
    python, tmp_path, defect, said
):
    (tmp_path / "adding.py").write_text(
        config_of("config.rewrite('Other.forward', pattern='{x} + 1', replacement='{x} + 5')", SCALED)
    )
    fails = f"{HERE}import thousand; thousand.install(thousand.{defect})\n{QUIET}{BOTH}"
    strict = python(fails, VEOMNI_PATCHES=None, VEOMNI_STRICT="1")
    assert strict.code == 1 and "IdiomError" in strict.err and SCALED in strict.err
    for patches, shown in ((None, ["2", "2"]), ("adding", ["2", "6"]), ("adding", ["2", "6"])):
        ran = python(fails, VEOMNI_PATCHES=patches)
        assert ran.out.split() == shown, ran.err
        assert f"{SCALED} is patched without idioms, because one failed" in ran.err and said in ran.err
    for patches, shown in ((None, ["1002", "2"]), ("adding", ["1002", "6"])):
        healthy = python(fails.replace(f"thousand.{defect}", ""), VEOMNI_PATCHES=patches)
        assert healthy.out.split() == shown, "what a failure left is not in the cache"


@pytest.mark.sample(1)
@pytest.mark.parametrize("strict", ["0", "1"])
def test_only_modules_that_would_be_patched_are_too_early(python, strict):
    code = f"import {SCALED}, {STILL}, {LAYERS}, transformers.models.auto.modeling_auto\n{HOOK}print('on')"
    ran = python(code, VEOMNI_PATCHES=None, VEOMNI_STRICT=strict)
    named = next(line for line in ran.err.splitlines() if "imported too early to be patched" in line)
    assert ": scaled. " in named and "Models lose: kernels for the heads of classifiers" in named
    assert "still" not in named and "modeling_auto" not in named
    assert (ran.out.strip() == "on") is (strict == "0")
    quiet = python(code, VEOMNI_PATCHES=None, VEOMNI_STRICT=strict, VEOMNI_IDIOMS="0")
    assert (quiet.out.strip(), quiet.err) == ("on", "")


def test_a_registered_pattern_reaches_modules_outside_transformers(python):
    ran = python(
        f"{QUIET}from veomni_hook import PatchConfig, register\nconfig = PatchConfig('table*')\n"
        "config.add_post_import_block('EARLIER = 1')\nregister(config)\nimport tables, table_config\n"
        "print([m.EARLIER for m in (tables, table_config)], hasattr(__import__('tiny_config'), 'EARLIER'))",
        VEOMNI_PATCHES=None,
    )
    assert ran.out.strip() == "[1, 1] False", ran.err


def test_a_pattern_config_of_the_settings_reaches_every_modeling_module(python, tmp_path):
    rewrite = "config.rewrite('Oth*.forward', pattern='{x} + 1', replacement='{x} + 5')"
    (tmp_path / "everywhere.py").write_text(config_of(rewrite, "transformers.models.*.modeling_*"))
    code = f"{HERE}{QUIET}{BOTH}\nimport {STILL} as b; print(b.Still().forward(1))"
    for _ in range(2):
        assert python(code, VEOMNI_PATCHES="everywhere", VEOMNI_IDIOMS="0").out.split() == ["2", "6", "1"]


def test_early_modules_of_a_pattern_are_named(python):
    ran = python(
        f"import {TINY}\nfrom veomni_hook import PatchConfig, register\n"
        "register(PatchConfig('transformers.models.ti*.modeling_*'))\nprint('on')"
    )
    assert ran.out.strip() == "on"
    assert "imported too early to be patched: tiny." in ran.err


def test_dump_shows_what_idioms_do(python, tmp_path):
    ran = python(f"{HOOK}import {SCALED}", VEOMNI_PATCHES=None, VEOMNI_DUMP_PATCHED="1")
    assert ran.code == 0, ran.err
    folder = tmp_path / "veomni_patched" / "models" / "scaled"
    assert "return 1000 + self.scale * x" in (folder / "modeling_scaled.py").read_text()
    assert "+            return 1000 + self.scale * x" in (folder / "modeling_scaled.diff").read_text()


def test_prepare_patches_as_an_import_does(python):
    ran = python(
        f"""
{HOOK}
import json
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.prepare import prepare
p = prepare({SCALED!r}, current_settings())
import {SCALED} as m
print(json.dumps([p.cache, "return 1000 + self.scale * x" in p.stored_text, p.stored_path == m.__file__, prepare({STILL!r}, current_settings()).reason, prepare({SCALED!r}, current_settings(), configs=[]).patched is None]))
""",
        VEOMNI_PATCHES=None,
    )
    assert json.loads(ran.out) == ["miss", True, True, "no patch applies", True], ran.err
