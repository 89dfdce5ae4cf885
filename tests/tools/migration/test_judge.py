from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.migration.example import CONFIG, MODULE, NAME, NEW, OLD, PACKAGE, config_module
from veomni_hook.finders import configs
from veomni_hook.patches.plan import Origin
from veomni_hook.patches.spec import PatchConfig
from veomni_hook.tools.migration.judge import (
    APPLIES,
    FAILS,
    GONE,
    MOVED,
    RENAMED,
    UNNECESSARY,
    Judgement,
    judge,
)
from veomni_hook.tools.migration.served import served

DATA = Path(__file__).parents[2] / "data"
THERE = Origin(MODULE, "/site/transformers/models/upgraded/modeling_upgraded.py", "transformers", "5.23.0")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[object]:
    """Load a config from its text."""
    monkeypatch.syspath_prepend(str(DATA))
    monkeypatch.syspath_prepend(str(tmp_path))

    def loaded(text: str = CONFIG) -> PatchConfig:
        config_module(tmp_path, text)
        sys.modules.pop(NAME, None)
        return configs.load([NAME])[0].configs[0]

    yield loaded
    for name in [n for n in sys.modules if n.partition(".")[0] in (PACKAGE, "patchgen_double")]:
        del sys.modules[name]


def by_target(judgements: list[Judgement]) -> dict[str, Judgement]:
    return {one.target: one for one in judgements}


def test_a_renamed_parameter_has_moved_only_if_upstream_does_not_say_so(load):
    decorator = '@deprecate_kwarg("mask", "6.1.0", new_name="attention")'
    head = "    def forward(self, x, mask=None):"
    silent = OLD.replace(head, head.replace("mask", "attention"))
    said = silent.replace("    def forward(self, x, att", f"    {decorator}\n    def forward(self, x, att")
    said = f"from ...utils.deprecation import deprecate_kwarg\n{said}"
    found = by_target(judge(load(), said, THERE, base=OLD, base_version="5.9.0"))["UpgradedModel.forward"]
    assert (found.verdict, found.is_fine) == (RENAMED, True)
    assert found.detail == "mask is attention now; the old keyword still works until 6.1"
    found = by_target(judge(load(), silent, THERE, base=OLD, base_version="5.9.0"))["UpgradedModel.forward"]
    assert found.verdict == MOVED
    assert found.detail.startswith("mask is likely attention now; upstream does not take the old keyword")


def test_a_renamed_definition_is_named(load):
    renamed = OLD.replace("def angles", "def positions")
    (one,) = [s for s in served(load(), renamed, THERE, base=OLD) if s.patch.target == "UpgradedModel.angles"]
    assert (one.status, one.detail) == (GONE, "the same code is now UpgradedModel.positions")


def test_upstream_that_defines_what_a_patch_adds_has_moved(load):
    newer = OLD.replace("    def same", "    def get_parallel_plan(self):\n        return 7\n\n    def same")
    found = by_target(judge(load(), newer, THERE, base=OLD))
    plan = found["UpgradedModel.get_parallel_plan"]
    assert plan.verdict == MOVED and "+def get_parallel_plan" in plan.diff.replace("+    def", "+def")
    assert by_target(judge(load(), newer, THERE))["UpgradedModel.get_parallel_plan"].verdict == APPLIES


def test_one_problem_does_not_hide_the_others(load):
    text = CONFIG + (
        "\n\n@config.override_method('UpgradedHead.extra')\ndef extra(self):\n    return nowhere(1)\n"
    )
    found = by_target(judge(load(text), NEW, THERE, base=OLD))
    failed = found["UpgradedHead.extra"]
    assert failed.verdict == FAILS and "nowhere" in failed.detail and failed.fix
    assert found["UpgradedModel.same"].verdict == APPLIES and found["UpgradedModel.forward"].verdict == MOVED


def test_a_helper_without_a_place_does_not_hide_the_patch_that_uses_it(load):
    text = CONFIG + (
        "\n\n@config.add_helper_after('UpgradedTalker')\nclass Wrapped:\n    pass\n"
        "\n\n@config.override_method('UpgradedModel.wrap')\ndef wrap(self):\n    return Wrapped()\n"
    )
    found = judge(load(text), NEW, THERE, base=OLD)
    assert by_target(found)["UpgradedModel.wrap"].verdict == APPLIES
    assert [(one.kind, one.verdict) for one in found if one.target == "UpgradedTalker"] == [
        ("exclude", GONE),
        ("helper", GONE),
    ]


def test_a_patch_that_is_for_something_else_too_is_needed(load):
    text = CONFIG.replace("return veomni_rms_norm(x, self.gain, self.epsilon)", "return gather_outputs(x)")
    text = text.replace("    dtype = x.dtype\n", "    veomni_rms_norm(x)\n    dtype = x.dtype\n", 1)
    norm = by_target(judge(load(text), OLD, THERE, base=OLD))["UpgradedRMSNorm.forward"]
    assert norm.verdict == APPLIES and norm.coverage is not None
    assert {one.name for one in norm.coverage.concerns} == {"kernel", "sequence parallel"}
    assert norm.coverage.by == "rms_norm/cast_before_weight" and len(norm.coverage.left) == 1


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("config.exclude_from_output('UpgradedModel')\n", "two patches claim UpgradedModel: "),
        (
            "config.override_method('UpgradedModel.same', model_same)\n",
            "two patches claim UpgradedModel.same",
        ),
    ],
)
def test_what_only_the_whole_config_does_wrong(load, added: str, said: str):
    found = judge(load(f"{CONFIG}\n\n{added}"), OLD, THERE, base=OLD)
    assert {one.verdict for one in found if one.patch is not None} == {APPLIES, UNNECESSARY}
    (whole,) = [one for one in found if one.patch is None]
    assert (whole.kind, whole.verdict) == ("config", FAILS) and said in whole.detail
