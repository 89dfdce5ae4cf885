"""Losses, logits and gradients of models whose sequences processes share, against one process.

Lengths that the processes cannot divide evenly, so that copies at the end are part of every case; with four
processes there are fewer key heads than processes.
"""

from importlib.metadata import version
from itertools import product

import pytest

CLOSE = 1e-5


def cases_of(family):
    # gpt_oss has sinks and gemma2 a softcap, which torch's fused attention does not know.
    implementations = ("eager",) if family in ("gpt_oss", "gemma2") else ("sdpa", "eager")
    return [
        *(
            "/".join((family, *each, "15"))
            for each in product(implementations, ("plain", "packed", "padded"))
        ),
        f"{family}/eager/padded/13/checkpoint=",
        f"{family}/eager/packed/15/checkpoint=reentrant",
    ]


OTHERS = [
    "mistral/sdpa/plain/12",
    "llama/sdpa/plain/5/num_items_in_batch=37",
    "llama/sdpa/plain/15/output_hidden_states=true",
    "llama/sdpa/plain/16/num_key_value_heads=1",
    "qwen3_moe/sdpa/padded/15/output_router_logits=true",
    "gpt_oss/eager/padded/15/output_router_logits=true",
    "llama/eager/plain/4/unread",
    "llama/sdpa/packed/15/unread",
    "llama/sdpa/padded/15/unread/num_items_in_batch=31",
    "qwen3_moe/sdpa/padded/9/unread/output_router_logits=true",
]
if not version("transformers").startswith("5.2."):  # there its loop collects what layers return
    OTHERS += ["gpt2/sdpa/plain/15/unread", "gpt2/eager/padded/13/checkpoint=reentrant"]


def check(ranks, world, kernels, *cases):
    sizes = f"sp={world}"
    told = ranks.run("facts_of_models:facts", world, sizes, cases=cases, sizes=sizes, kernels=kernels)[0]
    assert {case: fact for case, fact in told.items() if fact["worst"] > CLOSE} == {}
    assert told.keys() == set(cases)
    assert all(fact["split"] > 10 and fact["tensors"] > 15 for fact in told.values())


FAMILIES = ["llama", "gpt_oss", "qwen3", "gemma2", "gemma3", "qwen3_moe", "deepseek_v3"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_compute_what_one_computes(ranks, family, world):
    check(ranks, world, "eager", *cases_of(family))


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 4])
def test_heads_losses_and_captured_outputs(ranks, world):
    check(ranks, world, "torch", *OTHERS)
