"""What is registered or declared after the import of a patched module: never without a word."""

import pytest

from tests.finders.conftest import TINY

HEAD = f"""
import re, warnings, json, veomni_hook.install
from veomni_hook import PatchConfig, register
import tiny_config
from tiny_config import forward

def told(act, *arguments, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(*arguments, **options)
    return [f"{{type(each.message).__name__}}: {{each.message}}" for each in caught]

def mine(pattern={TINY!r}, target="TinyNorm.forward", **options):
    made = PatchConfig(pattern, label="mine:config", **options)
    made.override_method(target, forward)
    return made
"""


def judged(python, code, **environment):
    return python(f"{HEAD}\n{code}\nprint(json.dumps(found))", **environment).result


def test_a_config_registered_after_the_import_is_named(python):
    code = f"import {TINY}\nfound = told(register, mine())"
    (said,) = judged(python, code)
    assert said.startswith("AlreadyImportedWarning: the config mine:config has no effect on tiny, which was ")
    assert "imported before it was registered (" in said and "Fix: register the config, complete" in said
    strict = python(HEAD + code, VEOMNI_STRICT="1")
    assert strict.code == 1 and "AlreadyImportedError: the config mine:config has no effect" in strict.err


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("mine(device='npu')", False),
        ("mine('transformers.models.*.modeling_*', 'Missing*.forward')", False),
        ("mine('transformers.models.*.modeling_*', 'Tiny*.forward')", True),
        ("tiny_config.config", False),
        ("before", False),
    ],
)
def test_only_one_that_would_change_something_there_is_named(python, config, named):
    before = "before = mine(); register(before)\n" if config == "before" else ""
    code = f"{before}import {TINY}\nfound = told(register, {config})"
    said = judged(python, code, VEOMNI_PATCHES=None if config == "before" else "tiny_config")
    assert ["has no effect on tiny," in each for each in said] == [True] * named


VERBS = {
    "config.override_method('TinyModel.forward', forward)": "a method_override of TinyModel.forward",
    "config.override_method('TinyModel.forward')(forward)": "a method_override of TinyModel.forward",
    "config.rewrite('TinyNorm.forward', pattern='1', replacement='2')": "a rewrite of TinyNorm.forward",
    "config.map_class('TinyNorm', 'torch.nn:Identity')": "a class_mapping of TinyNorm",
    "config.add_helper(forward)": "an addition",
    "config.inherit(other)": "an addition",
    "config.adopt_init_modifications(other)": "init_modification of TinyModel",
}


def test_every_verb_of_a_registered_config_that_comes_late_is_named(python):
    code = f"""
other = PatchConfig({TINY!r})
other.add_import("json")
other.modify_init("TinyModel", forward)
config = mine(); register(config)
found = [told(lambda: config.add_method("TinyNorm.more", forward))]
import {TINY}
found += [told(lambda: eval(verb)) for verb in {list(VERBS)}]
"""
    before, *after = judged(python, code, VEOMNI_PATCHES=None)
    assert before == []
    for said, (verb, named) in zip(after, VERBS.items(), strict=True):
        assert len(said) == 1, verb
        assert f"{named} in mine:config has no effect on tiny, which was imported before it was d" in said[0]


def test_a_verb_that_comes_late_is_an_error_if_strict(python):
    code = f"config = mine(); register(config)\nimport {TINY}\nconfig.override_method('TinyModel.forward', forward)"
    strict = python(HEAD + code, VEOMNI_STRICT="1", VEOMNI_PATCHES=None)
    assert strict.code == 1 and "AlreadyImportedError: a method_override of TinyModel.forward" in strict.err


def test_a_pattern_hears_of_late_verbs_with_targets_only(python):
    code = f"""
config = mine("transformers.models.*.modeling_*", "Tiny*.forward"); register(config)
import {TINY}
found = told(lambda: [config.override_method(name + "*.forward", forward) for name in ("Missing", "TinyM")])
"""
    (said,) = judged(python, code, VEOMNI_PATCHES=None)
    assert "a method_override of TinyM*.forward" in said


def test_what_is_mapped_may_be_mapped_anew(python):
    """A class, and an expression with the classes that it meant: TinyModel, too, which the module never constructs."""
    code = f"""
one, other = (PatchConfig({TINY!r}, label=label) for label in ("mine:config", "other:config"))
every = re.compile("^Tiny")
one.map_class("TinyNorm", "torch.nn:Identity"); other.map_class(every, "torch.nn:Identity")
register({{}})
import {TINY}
def again():
    one.unmap_class("TinyNorm")
    one.map_class("TinyNorm", "torch.nn:Flatten")
    one.map_class(re.compile("Norm$"), "torch.nn:Identity")
def every_again():
    other.unmap_class(every)
    other.map_class(every, "torch.nn:Flatten")
found = told({{}})
"""
    assert judged(python, code.format("one", "again"), VEOMNI_PATCHES=None) == []
    assert judged(python, code.format("other", "every_again"), VEOMNI_PATCHES=None) == []
    more = "lambda: one.map_class(every, 'torch.nn:Identity')"
    (said,) = judged(python, code.format("one", more), VEOMNI_PATCHES=None)
    assert "a class_mapping of ^Tiny" in said
