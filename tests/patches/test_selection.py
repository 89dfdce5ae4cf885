import re
from pathlib import Path
from typing import Any

import pytest

from tests.patches.upstream import source_of
from veomni_hook.errors import PatchConflictError, PatchTargetError
from veomni_hook.patches.code.comparison import fingerprint
from veomni_hook.patches.code.document import Document
from veomni_hook.patches.engine import Origin, applicable, patch_source
from veomni_hook.patches.selection import unapplied
from veomni_hook.patches.spec import PatchConfig

HEAD = "from veomni_hook.patches.spec import *\nconfig = PatchConfig('pkg.*.up*')\n"
ORIGIN = Origin("pkg.a.upstream", "/site/pkg/a/upstream.py", "pkg", "1.0")
UPSTREAM = """\
import math

def helper(x):
    return x

class OneNorm(object):
    def forward(self, x):
        return helper(x) * 2

class TwoNorm(object):
    def __init__(self):
        self.made = 0

    def forward(self, x):
        return helper(x) + helper(2)

    def extra(self):
        return 1

class Other(object):
    def forward(self, x):
        return x
"""


def digest(name):
    return fingerprint(Document(UPSTREAM).find(name)[0].node)


@pytest.fixture
def apply(load):
    def patch(code: str, upstream: str = UPSTREAM) -> Any:
        return patch_source(upstream, [load(code, head=HEAD).config], ORIGIN)

    return patch


def applied(result):
    return [(one.kind, one.target) for one in result.report.applied]


@pytest.mark.parametrize(
    ("pattern", "module", "applies"),
    [
        ("transformers.models.*.modeling_*", "transformers.models.a.modeling_a", True),
        ("transformers.models.*.modeling_*", "transformers.models.a.configuration_a", False),
        ("*.modeling_[ab]", "x.modeling_a", True),
        ("*.modeling_a", "x.modeling_A", False),
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
    ],
)
def test_which_modules_a_config_is_for(pattern, module, applies):
    config = PatchConfig(pattern)
    assert config.applies_to(module) is applies
    assert config.is_pattern is (pattern != "a.b")
    assert applicable([config], module, "gpu") == ([config] if applies else [])


def test_a_rewrite_of_every_match_in_every_target(apply):
    code = "config.rewrite('*Norm.forward', pattern='helper({x})', replacement='{x}', matches=None)\n"
    result = apply(code)
    assert applied(result) == [("rewrite", "OneNorm.forward"), ("rewrite", "TwoNorm.forward")]
    assert {one.declared for one in result.report.applied} == {"*Norm.forward"}
    assert "return x * 2" in result.plain and "return x + 2" in result.plain
    assert "Other" in result.report.untouched


def test_a_number_of_matches_is_exact_in_every_target(apply):
    code = "config.rewrite('*Norm.forward', pattern='helper({x})', replacement='{x}', matches=1)\n"
    with pytest.raises(PatchTargetError, match=r"match once in TwoNorm\.forward, it matches 2 times"):
        apply(code)
    with pytest.raises(PatchTargetError, match=r"match once in OneNorm\.forward, it matches 0 times"):
        apply(code.replace("helper", "absent"))


def test_any_number_of_matches_is_at_least_one_for_one_module(patched):
    code = "config.rewrite('OneNorm.forward', pattern='helper({x})', replacement='{x}', matches=None)\n"
    assert "return x * 2" in patched(UPSTREAM, code).plain
    with pytest.raises(PatchTargetError, match="match at least once"):
        patched(UPSTREAM, code.replace("helper", "absent"))


def test_what_is_absent_does_not_apply(apply):
    code = (
        "@config.override_method('*Norm.forward')\ndef forward(self, x): return 5\n"
        "@config.override_method('Absent.forward')\ndef f(self, x): return 5\n"
        "@config.replace_function('absent')\ndef g(x): return 5\n"
        "@config.replace_class('*Absent')\nclass C: pass\n"
        "config.exclude_from_output('Absent')\n"
        "config.drop_import_names('torch')\n"
        "@config.add_helper_after('Absent')\ndef h(): pass\n"
    )
    assert applied(apply(code)) == [
        ("method_override", "OneNorm.forward"),
        ("method_override", "TwoNorm.forward"),
    ]


def test_what_is_there_applies(apply, run):
    code = (
        "config.exclude_from_output('Other')\n"
        "config.drop_import_names('math')\n"
        "@config.add_helper_after('helper')\ndef h(): return 7\n"
        "@config.replace_function('help*')\ndef g(x): return 5\n"
        "@config.modify_init('Two*')\ndef i(original, self):\n    original(self)\n    self.made = 1\n"
    )
    module = run(apply(code))
    assert "Other" not in module and "math" not in module and module["h"]() == 7
    assert module["OneNorm"]().forward(1) == 10 and module["TwoNorm"]().made == 1


@pytest.mark.parametrize(("name", "dropped"), [("path", True), ("os.path", True), ("os", False)])
def test_a_dotted_import_is_dropped_by_its_last_name(apply, name, dropped):
    result = apply(f"config.drop_import_names({name!r})\n", "import os.path\nx = 1\n")
    assert applied(result) == [("drop_import", name)] * dropped


def test_a_config_of_which_nothing_applies_brings_nothing(apply):
    code = (
        "config.add_import('os')\nconfig.add_post_import_block('X = 1')\n"
        "config.add_slot('s', op='o', variant='v')\n@config.add_helper\ndef h(): pass\n"
        "@config.replace_class('Absent')\nclass C: pass\n"
    )
    assert apply(code).text == UPSTREAM
    assert "X = 1" in apply(code.replace("'Absent'", "'Other'").replace("class C: pass", OTHER)).text


OTHER = "class C(object):\n    def forward(self, x): return 1\n"


def test_a_method_is_added_to_the_classes_that_lack_it(apply, run):
    result = apply("@config.add_method('*Norm.extra')\ndef extra(self): return 2\n")
    assert applied(result) == [("method_addition", "OneNorm.extra")]
    assert run(result)["OneNorm"]().extra() == 2


def test_fingerprints_select_bodies(apply):
    code = (
        f"@config.insert_guard('*.forward', fingerprints=['{digest('OneNorm.forward')}', 'unknown'])\n"
        "def g(x):\n    if x is None: return 0\n"
    )
    assert applied(apply(code)) == [("guard", "OneNorm.forward")]


def test_what_a_patch_relies_on_selects_modules(apply):
    code = (
        f"@config.insert_guard('One*.forward', fingerprints=['{digest('OneNorm.forward')}'],\n"
        "    relies_on={'helper': ['%s']})\n"
        "def g(x):\n    if x is None: return 0\n"
    )
    assert applied(apply(code % digest("helper"))) == [("guard", "OneNorm.forward")]
    assert applied(apply(code % "other")) == []
    assert applied(apply(code % digest("helper"), UPSTREAM.replace("def helper", "def helped"))) == []


def test_before_selects_functions(apply):
    code = (
        "@config.insert_guard('*.forward', fingerprints=(), before='return helper({y}) * 2')\n"
        "def g(y):\n    if y is None: return 0\n"
    )
    assert applied(apply(code)) == [("guard", "OneNorm.forward")]


def test_a_pattern_and_a_name_on_one_target_are_a_conflict_unless_one_is_the_base(load, run):
    every = load("@config.override_method('*Norm.forward')\ndef f(self, x): return 5\n", head=HEAD).config
    one = load("@config.override_method('OneNorm.forward')\ndef f(self, x): return 6\n", head=HEAD).config
    one.source_module = ORIGIN.module
    with pytest.raises(PatchConflictError, match=r"two patches claim OneNorm\.forward"):
        patch_source(UPSTREAM, [every, one], ORIGIN)
    one.base = every
    result = patch_source(UPSTREAM, applicable([one], ORIGIN.module, "gpu"), ORIGIN)
    module = run(result)
    assert (module["OneNorm"]().forward(0), module["TwoNorm"]().forward(0)) == (6, 5)
    assert unapplied(every, [result.report]) == []
    two = load("@config.override_method('TwoNorm.forward')\ndef f(self, x): return 7\n", head=HEAD).config
    two.base = one
    overruled = patch_source(UPSTREAM, applicable([one, two], ORIGIN.module, "gpu"), ORIGIN).report
    assert {y.target for y in overruled.yielded if y.config == every.name} == {
        "OneNorm.forward",
        "TwoNorm.forward",
    }
    assert unapplied(every, [overruled]) == []


def test_patches_that_apply_nowhere_are_told(load):
    code = (
        "config.rewrite('*Norm.forward', pattern='helper({x})', replacement='{x}', matches=None)\n"
        "config.rewrite('*Norm.forward', pattern='absent({x})', replacement='{x}', matches=None,\n"
        "    description='of what is absent')\n"
        "@config.override_method('Absent.forward')\ndef f(self, x): return 5\n"
    )
    config = load(code, head=HEAD).config
    empty = patch_source("x = 1\n", [config], ORIGIN).report
    assert len(unapplied(config, [empty])) == 3
    report = patch_source(UPSTREAM, [config], ORIGIN).report
    assert [p.target for p in unapplied(config, [empty, report])] == ["*Norm.forward", "Absent.forward"]
    assert unapplied(config, [report])[0].description == "of what is absent"


def example_of_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "patches.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "modeling_*" in b)
    return str(block)


def test_the_example_of_the_docs_on_installed_modules(load):
    config = load(example_of_the_docs(), head="from veomni_hook.patches.spec import *\n").config
    reports = {}
    for family in ("qwen3", "llama", "timm_wrapper"):
        module = f"transformers.models.{family}.modeling_{family}"
        source = source_of(family)
        assert applicable([config], module, "gpu")
        reports[family] = patch_source(source, [config], Origin(module, "m.py", "transformers", "1")).report
    applied = {family: [one.target for one in r.applied if one.declared] for family, r in reports.items()}
    assert applied == {
        "qwen3": ["Qwen3Attention.forward"],
        "llama": ["LlamaAttention.forward"],
        "timm_wrapper": [],
    }
    assert not reports["timm_wrapper"].applied and not unapplied(config, reports.values())
