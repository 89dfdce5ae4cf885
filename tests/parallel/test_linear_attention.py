"""Layers of linear attention whose sequences processes share, against one process.

Lengths with copies at the end, with fewer positions a process than a convolution reads back, and with samples
that begin behind a border or in what is read across it. With four processes there are fewer key heads than
processes.
"""

from importlib.util import find_spec

import pytest
import transformers
from packaging.version import Version
from transformers.integrations import hub_kernels

from tests.parallel.test_models import check

UPSTREAMS = ["plain/15", "padded/13/checkpoint=", "plain/4"]
PACKED = ["packed/15/checkpoint=reentrant", "packed/12", "packed/21"]
#: Before 5.17, layers hold the functions that they call, and the convolutions of olmo_hybrid are classes.
HELD = not hasattr(hub_kernels, "use_kernel_func_from_hub_with_fallback")
RELEASE = Version(transformers.__version__)
DIVIDED = pytest.mark.skipif(RELEASE < Version("5.9"), reason="before 5.9 its form is refused")
QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
OTHERS = ("olmo_hybrid", "kimi_linear", "bailing_hybrid")
FAMILIES = [
    *(each for each in OTHERS if find_spec(f"transformers.models.{each}") is not None and not HELD),
    *(pytest.param(each, marks=DIVIDED if HELD else pytest.mark.slow) for each in QWEN),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_upstreams_code_computes_what_one_process_computes(ranks, family, world):
    check(ranks, world, "eager", *(f"{family}/eager/{each}" for each in UPSTREAMS))


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_samples_that_share_a_row_stay_apart(ranks, family, world):
    check(ranks, world, "torch", *(f"{family}/sdpa/{each}" for each in PACKED))


@pytest.fixture
def facts(ranks):
    if HELD:
        pytest.skip("the facts are of families that come with 5.17")
    return ranks.once("facts_of_linear_attention:facts", 2, "sp=2")[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "heads",
            [
                "OlmoHybridGatedDeltaNet (layer 0)",
                "sp=2 does not divide its 3 value heads",
                "choose sp from 1, or",
            ],
        ),
        ("channels", ["KimiLinearDeltaAttention (layer 0)", "sp=2 does not divide its 3 value heads"]),
        ("state", ["OlmoHybridGatedDeltaNet (layer 0)", "its cache holds a state already"]),
        ("convolution", ["the convolution in front of its rule saw a part of the sequence alone"]),
        ("layer", ["OlmoHybridModel", "only 2 of its 3 layers", "a rule of linear attention"]),
        ("mask", ["its mask is [2, 1, 16, 16], not [rows, positions]"]),
        ("filled", ["this cache was filled in a pass with gradients"]),
    ],
)
def test_refusals(facts, name, parts):
    assert [part for part in parts if part not in facts["refusals"][name]] == [], facts["refusals"][name]


def test_a_rule_gets_whole_sequences_and_a_share_of_the_heads(facts):
    # In 5.17 the layer repeats key heads in front of its rule.
    keys = 2 if RELEASE < Version("5.23") else 1
    # Key heads 2, value heads 4; 15 positions and a copy of the last; bfloat16 with decays in float32, as mixed precision has them.
    assert facts["seen"] == {
        "shapes": [[2, 16, keys, 6], [2, 16, 2, 4], [2, 16, 2]],
        "dtypes": ["torch.bfloat16", "torch.float32"],
    }


def test_dtypes_of_mixed_precision(facts):
    assert facts["autocast"] < 0.02


def test_explain_says_what_a_rule_gets(facts):
    told = "rules of linear attention get all positions and 2 of 4 value heads"
    assert [told in each for each in facts["explain"]] == [True, True]
