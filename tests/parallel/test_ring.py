"""Attention whose keys go around a ring: exact for every mask, and the same work for all processes."""

import pytest

EXACT = 1e-12
#: In float32: 4e-7 to 7e-7 were seen. Routers and softcaps make differences of roundings larger.
CLOSE, FAR = 1e-6, 1e-5


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_outputs_and_gradients_are_those_of_one_process(ranks, world):
    # Copies at the end, halves of other lengths, a process that has copies only; one or two queries at a time.
    lengths = [2 * world, 13, 16]
    for told in ranks.run("facts_of_ring:facts", world, f"sp={world}", lengths=lengths, scores=40):
        assert {case: far for case, far in told.items() if not far < EXACT} == {}
        assert len(told) == 9


def test_flash_attention_of_pairs(ranks):
    assert max(ranks.run("facts_of_ring:fused", 2, "sp=2")) < EXACT


def test_causal_attention_is_the_same_work_for_all(ranks):
    told = ranks.run("facts_of_ring:work", 4, "sp=4", length=64)
    pairs = {case: [fact[case] for fact in told] for case in told[0]}
    # Of 8 x 8 halves, 36 are not behind their queries: 9 in each process.
    assert [count / pairs["all"][0] for count in pairs["causal"]] == [9 / 16] * 4
    assert max(pairs["packed"]) < pairs["causal"][0]
    assert max(pairs["window"]) == pairs["all"][0] / 4


def check(ranks, world, ring, *cases, bound=CLOSE):
    sizes = f"sp={world}"
    told = ranks.run("facts_of_models:facts", world, sizes, cases=cases, sizes=sizes, kernels="eager")[0]
    assert {case: fact for case, fact in told.items() if not fact["worst"] < bound} == {}
    assert {case: fact["rings"] for case, fact in told.items()} == {case: [ring] for case in cases}


THREE = "num_attention_heads=3/num_key_value_heads=3/hidden_size=24"


def test_two_key_heads_in_four_processes(ranks):
    cases = (
        *("llama/sdpa/plain/15", "llama/sdpa/packed/15", "llama/sdpa/padded/15", "mistral/sdpa/plain/16"),
        *("llama/eager/padded/13/checkpoint=", "llama/eager/packed/15/checkpoint=reentrant"),
    )
    check(ranks, 4, 2, *cases)
    check(ranks, 4, 2, "gpt_oss/eager/packed/15", bound=FAR)


def test_heads_that_cannot_be_divided(ranks):
    check(
        ranks, 2, 2, f"llama/sdpa/plain/15/{THREE}", f"llama/eager/padded/15/{THREE}",
        f"llama/sdpa/packed/16/{THREE}",
    )  # fmt: skip


@pytest.mark.slow
def test_one_key_head(ranks):
    families = ("llama/sdpa", "llama/eager", "gemma2/eager", "gpt_oss/eager", "gemma3/sdpa", "qwen3_moe/sdpa")
    batches = ("plain/4", "plain/5", "packed/15", "padded/15")
    cases = [f"{family}/{batch}/num_key_value_heads=1" for family in families for batch in batches]
    check(ranks, 4, 4, *cases, bound=FAR)
