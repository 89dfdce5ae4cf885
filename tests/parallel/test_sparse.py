"""Attention with an indexer or compressors whose sequences processes share, against one process.

Fewer keys are chosen than there are. Lengths with copies at the end, so that a window of a compressor lies across
the border, and a last process that has nothing but copies.
"""

from importlib.util import find_spec

import pytest

from tests.parallel.test_linear_attention import HELD

# Hyper-connections divide sums by each other twenty times in float32; in float64 they differ by 1e-13.
CLOSE = 1e-4
KINDS = ["eager/plain/15", "eager/padded/13/checkpoint="]
FUSED = ["sdpa/packed/15", "sdpa/padded/13/checkpoint=reentrant"]
#: By family: the cases. Samples that share a row are refused for glm5_next, whose linear attention gets no positions,
#: and deepseek_v4, whose windows would not end with them.
CASES = {
    "deepseek_v4": [*KINDS, "eager/plain/14/checkpoint=reentrant"],
    "deepseek_v32": [KINDS[0], *FUSED],
    "glm5_next": [KINDS[1], "sdpa/plain/14"],
    "glm_moe_dsa": [*KINDS, *FUSED],
    "dots3_note": ["sdpa/plain/15", *FUSED],
    "axk2": [*KINDS, *FUSED],
    "hy_v4": KINDS,
}
NAMED = ("deepseek_v4", "deepseek_v32", "glm5_next")


@pytest.mark.parametrize(
    "family", [name if name in NAMED else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_processes_compute_what_one_computes(ranks, family):
    check(ranks, 2, *(f"{family}/{kind}" for kind in CASES[family]))


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_a_process_that_has_copies_alone(ranks, family):
    check(ranks, 4, f"{family}/eager/plain/5")


def needs(family):
    if find_spec(f"transformers.models.{family}") is None:
        pytest.skip(f"this release has no {family}")
    if family == "glm_moe_dsa" and HELD:
        pytest.skip("before 5.17 it has a form that is refused")


def check(ranks, world, *cases):
    needs(cases[0].partition("/")[0])
    sizes = f"sp={world}"
    told = ranks.run("facts_of_models:facts", world, sizes, cases=cases, sizes=sizes, kernels="eager")[0]
    assert {case: fact for case, fact in told.items() if fact["worst"] > CLOSE} == {}
    assert all(fact["split"] > 10 and fact["tensors"] > 40 for fact in told.values())


@pytest.fixture
def facts(ranks):
    needs("deepseek_v4")
    return ranks.once("facts_of_sparse:facts", 2, "sp=2")[0]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mask", ["DeepseekV4Attention", "its mask is a dict: choose sdpa or eager attention"]),
        (
            "queries",
            ["DeepseekV4Attention", "its mask is [1, 1, 16, 16], not one of 8 queries and 16 keys"],
        ),
    ],
)
def test_refusals(facts, name, parts):
    assert [part for part in parts if part not in facts["refusals"][name]] == [], facts["refusals"][name]


def test_a_process_does_half_of_the_work_of_attention(facts):
    """Products of queries and keys, and scores of indexers: what grows with the square of the length."""
    for family, (one, split) in facts["products"].items():
        assert 0.45 < split / one < 0.6, (family, one, split)


def test_explain_says_what_attention_gets(facts):
    assert "attention (eager) gets its queries there, and the keys of all positions" in facts["explain"]
