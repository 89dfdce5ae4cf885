"""Rewrites keep the meaning of small functions, a few modules go through all kinds, and what is wrong is said to be."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.rehearsal.code import Facts
from tests.rehearsal.kinds import KINDS, rewritten
from tests.rehearsal.release import Release
from tests.rehearsal.run import Rehearsal, Result
from tests.rehearsal.sites import Found, became, found
from veomni_hook.patches.code.tree import compared_with_none
from veomni_hook.patches.site import Status

SOURCE = '''
import math
from math import sqrt as root

def pair(a, b, scale=1):
    """Two of them."""
    left = a * scale
    return left - b

def only(x):
    return x * x

def weigh(first, second):
    total = pair(first, second, scale=2)
    other = pair(second, b=first)
    if total > other:
        total = total + 1
        return total
    kind = "big" if total > 10 else "small"
    parts = {"big": 1, "small": 2}
    number = parts["big"] if kind == "big" else parts["small"]
    if first is None:
        number = 7
    else:
        number = number + only(first)
    return number * total + root(4)

class Layer:
    def __init__(self, size: int, memory=None):
        self.size = size
        self.step = size * 2

    def forward(self, states: int, memory: int | None = None, **kwargs):
        start = states + self.size
        stop = self.grow(start, self.step)
        middle = only(stop)
        if memory is not None:
            middle = middle + memory
        late = kwargs.get("memory", 3)
        return [start, stop, middle, late]

    def grow(self, value, by):
        for turn in range(3):
            value = value + by
            by = by - turn
        return value

def run(layer, value):
    return [layer.forward(value), layer.forward(value, memory=5), layer.forward(states=value, memory=None)]

def everything():
    numbers = [weigh(a, b) for a in (1, 2, 30) for b in (0, 2, 5)]
    return numbers, run(Layer(3), 4), run(Layer(2), value=7)
'''
FACTS = Facts(names={"memory": "kept"})


def result(texts):
    scope: dict[str, object] = {}
    for text in reversed(texts.values()):  # modules that were added come last, and are imported first
        exec(
            "\n".join(line for line in text.splitlines() if not line.startswith("from transformers.models")),
            scope,
        )
    return scope["everything"]()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rewrite_keeps_the_meaning_and_changes_the_text(kind):
    expected, plain = result({"": SOURCE}), ast.unparse(ast.parse(SOURCE))
    name = "transformers.models.some.modeling_some"
    made = [rewritten(kind, name, SOURCE, seed, FACTS) for seed in range(6)]
    assert [result(texts) for texts in made] == [expected] * 6
    assert any(texts[name].strip() != plain for texts in made) == (kind != "unparsed")
    assert made[0] == rewritten(kind, name, SOURCE, 0, FACTS)


NAME = "transformers.models.some.modeling_some"
MODEL = """
import torch
from torch import nn
from ...cache_utils import Cache
from ...masking_utils import create_causal_mask

class SomeModel(nn.Module):
    def forward(self, hidden_states, cache: Cache | None = None, position_ids=None):
        return hidden_states

class SomeRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.float()
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.eps)).to(dtype)
"""


PARAMETERS = ("cache", "memory", "position_ids")


def inserted(*arguments, parameters=PARAMETERS):
    """A site whose code gives a function of ours the arguments."""
    (norm,) = [each for each in found(NAME, MODEL) if each.site.op == "rms_norm"]
    site = replace(norm.site, op="boundaries", target="SomeModel.forward", captures={})
    calls = {"found": dict(zip(("position_ids", "cache", "labels"), arguments, strict=False))}
    return [Found(site, calls, frozenset({*parameters}))]


BOUND = ("position_ids", "cache", 'kwargs.get("labels")')


@pytest.mark.parametrize(
    ("now", "names", "what"),
    [
        (BOUND, {}, "routed"),
        (("position_ids", "memory", BOUND[2]), {"cache": "memory"}, "routed"),
        (("position_ids", "kept_1", BOUND[2]), {}, "routed"),  # a temporary: the proof tells what it holds
        (("position_ids", "None", BOUND[2]), {}, "wrong"),
        (("position_ids", "None", BOUND[2]), {"cache": "memory"}, "wrong"),
        (("cache", "position_ids", BOUND[2]), {}, "wrong"),
        (BOUND[:2], {}, "wrong"),
        (BOUND, {"cache": "memory"}, "wrong"),
        (BOUND, {"labels": "targets"}, "wrong"),
        (BOUND, {"position_ids": "places"}, "wrong"),
    ],
)
def test_an_operand_that_is_lost_or_another_is_wrong(now, names, what):
    parameters = {*PARAMETERS} - names.keys()
    (one,) = became(inserted(*BOUND), inserted(*now, parameters=parameters), names)
    assert one.what == what, one


def test_an_operand_that_changes_no_number_may_be_lost():
    (one,) = became(
        [replace(inserted()[0], arguments={"plus_zero": {"data": "x", "elsewhere": "y is None"}})],
        [replace(inserted()[0], arguments={"plus_zero": {"data": "x"}})],
        {},
    )
    assert (one.what, one.detail) == ("otherwise", "elsewhere is lost")


def test_another_parameter_as_a_capture_is_routed_otherwise():
    before, after = inserted(*BOUND)[0], inserted(*BOUND)[0]
    pair = [
        replace(one, site=replace(one.site, captures={"x": text}))
        for one, text in ((before, "cache"), (after, "memory"))
    ]
    assert became(pair[:1], pair[1:], {})[0].what == "otherwise"
    assert became(pair[:1], pair[1:], {"cache": "memory"})[0].what == "routed"


def test_a_fusion_whose_parts_are_there_is_not_lost():
    (site,) = inserted(*BOUND)
    fusion, norm = (
        replace(site, site=replace(site.site, op=op, target=op)) for op in ("add_rms_norm", "rms_norm")
    )
    assert [each.what for each in became([fusion, norm], [norm], {})] == ["routed", "otherwise"]
    assert [each.what for each in became([fusion], [], {})] == ["lost"]


def test_a_site_is_missed_with_a_reason_or_lost():
    before = found(NAME, MODEL)
    (norm,) = [each for each in before if each.routed]
    gone = [
        replace(norm, site=replace(norm.site, status=Status.MISSED, reason=why))
        for why in ("another eps", "")
    ]
    outcomes = [became(before, after, {})[0] for after in ([gone[0]], [gone[1]], [])]
    assert [(each.what, each.detail) for each in outcomes] == [
        ("missed", "another eps"),
        ("lost", ""),
        ("lost", ""),
    ]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Two modules of the installed release, without what all kinds must know of the others."""
    hybrid = "olmo_hybrid" if find_spec("transformers.models.olmo_hybrid") else "qwen3_next"
    modules = [f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", hybrid)]
    made = Rehearsal(Release.at(None), modules, 3, 1, 0, tmp_path_factory.mktemp("rehearsal"))
    made.facts = Facts(names={"past_key_values": "memory", "labels": "truths"}, foreign={"is_causal"})
    return made


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_two_modules_in_all_kinds(rehearsal, kind):
    result = rehearsal.of(kind)
    lost = {one.op for _, one in result.sites if one.what == "lost"}
    assert result.counts["routed"] and not lost
    assert not result.counts["wrong"] and not result.counts["broken"], result.failures
    if kind == "unparsed":
        assert set(result.counts) == {"routed"}


@pytest.mark.parametrize(
    ("verdict", "counted"),
    [
        ({}, {"proven": 1, "same": 1}),
        ({"outcome": "differs"}, {"wrong": 1, "same": 1}),
        ({"outcome": "unreached"}, {"unproven": 1, "same": 1}),
        ({"digests": [["x", "b"]]}, {"proven": 1, "broken": 1}),
        ({"digests": [["x", "a"], ["x", "a"]]}, {"proven": 1}),  # other calls: nothing to compare
        ({"digests": [["y", "b"]]}, {"proven": 1}),  # other operands, too
        ("SyntaxError: it is none", {"broken": 1}),
    ],
)
def test_another_number_is_wrong_and_another_original_is_a_broken_rewrite(rehearsal, verdict, counted):
    proved = {"outcome": "equal", "detail": "", "digests": [["x", "a"]]}
    rehearsal._original = {NAME: {"rms_norm SomeRMSNorm.forward 0": proved}}
    result = Result("some")
    now = verdict if isinstance(verdict, str) else {"rms_norm SomeRMSNorm.forward 0": proved | verdict}
    rehearsal._compared(result, NAME, now)
    assert result.counts == counted
    assert bool(result.failures) == bool({"wrong", "broken"} & counted.keys())


@pytest.mark.parametrize("text", ["x is not None", "None is not x"])
def test_a_comparison_with_none_is_read_either_way_round(text):
    node = ast.parse(text, mode="eval").body
    found = compared_with_none(node, ast.IsNot)
    assert isinstance(found, ast.Name) and found.id == "x"
    assert compared_with_none(node, ast.Is) is None
