"""The dispatcher of one experts module: any routing, recomputes, and what it sends."""

import pytest

CLOSE = 1e-5
CASES = [
    "random", "zero tokens on one rank", "zero tokens everywhere but on one rank", "all to one expert",
    "no tokens for one rank", "duplicate ids", "ids of no expert", "of other dtype", "not contiguous",
]  # fmt: skip


def close(answers):
    for rank, answer in enumerate(answers):
        assert max(answer.values()) < CLOSE, (rank, answer)


def all_close(answers, cases):
    for rank, answer in enumerate(answers):
        assert answer.keys() == set(cases)
        assert {case: far for case, far in answer.items() if max(far.values()) >= CLOSE} == {}, rank


@pytest.mark.slow
@pytest.mark.parametrize(("size", "k"), [(2, 2), (2, 3), (4, 3), (4, 7)])
def test_any_routing_is_that_of_one_process(crew, size, k):
    """On two ranks, rows of three experts are sent everywhere, on four those of seven."""
    all_close(crew(size).run("cases:layers_of", cases=CASES, k=k), CASES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_transformers_own_experts_run_on_the_receiving_rank(two, kind, implementation):
    """gpt_oss's loop knows no mark for places of other ranks."""
    options = {"kernels": "eager", "kind": kind, "implementation": implementation}
    all_close(two.run("cases:layers_of", cases=CASES[:6], **options), CASES[:6])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_few_of_many_places(four, kind):
    """Most places of a received row are for other ranks: pairs get rows of their own."""
    close(four.run("cases:layer", case="random", kind=kind, k=8))


@pytest.mark.parametrize("k", [2, 3])
def test_a_rank_without_tokens(two, k):
    """It sends no rows where they are wanted, and rows of zeros where all are sent."""
    close(two.run("cases:layer", case="zero tokens on one rank", k=k))


@pytest.mark.sample(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("perturbed", ["", "noise", "order"])
@pytest.mark.parametrize("k", [2, 3])
def test_a_recompute_dispatches_as_its_forward_did(two, perturbed, reentrant, k):
    """On two ranks, rows of three experts are sent everywhere, those of two where they are wanted."""
    for answer in two.run("cases:recompute", perturbed=perturbed, reentrant=reentrant, k=k):
        assert bool(answer["drifted"]) is (perturbed == "noise")
        # Rows out and sums back, in both passes; counts, ids and weights only in the first. Without reentrance
        # a recompute ends with the last saved tensor: where all rows are sent, that is one of the experts'.
        first = 2 if k == 2 else 1
        again = 1 if k == 3 and not reentrant else 2
        splits = answer["splits"][first:]
        assert splits[:again] == splits[2 : 2 + again]
        assert answer["of_experts"] < CLOSE
        # An expert that the recompute would not have picked gives the router no gradient.
        assert answer["far"] < (0.5 if perturbed == "noise" else CLOSE)


@pytest.mark.usefixtures("divided_by_transformers")
def test_a_quarter_of_the_bytes(two):
    ours, theirs = (
        two.run("cases:traffic", dispatcher="veomni"),
        two.run("cases:traffic", dispatcher="all_to_all"),
    )
    for own, other in zip(ours, theirs, strict=True):
        assert own["forward"] < 0.3 * other["forward"]
        assert own["backward"] < 0.3 * other["backward"]


@pytest.mark.parametrize("k", [2, 8])
def test_the_host_reads_once(two, k):
    assert [each["reads"] for each in two.run("cases:traffic", dispatcher="veomni", k=k)] == [1, 1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("k", [1, 3])
def test_sixteen_bits(two, k):
    """Weights of two bytes travel beside ids of four, an odd number of them, and for one row alone."""
    for tokens in (1, 20):
        for answer in two.run("cases:layer", case="random", k=k, tokens=tokens, dtype="bfloat16"):
            assert max(answer.values()) < 0.03


@pytest.mark.slow
def test_a_compiled_block_dispatches_between_its_graphs(two):
    close(two.run("cases:compiled"))
