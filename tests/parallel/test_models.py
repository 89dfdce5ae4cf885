"""Losses, logits and gradients of models whose sequences processes share, against one process.

Lengths that the processes cannot divide evenly, so that copies at the end are part of every case; with four
processes there are fewer key heads than processes.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.parallel.job import once

CLOSE = 1e-5
PAIRS = (("llama", "gpt_oss"), ("qwen3", "gemma3"), ("qwen3_moe", "deepseek_v3"))


def cases_of(*families: str) -> list[str]:
    cases = []
    for family in families:
        # gpt_oss has sinks, which torch's fused attention does not know.
        implementations = ("eager",) if family == "gpt_oss" else ("sdpa", "eager")
        cases += [
            "/".join((family, *each, "15"))
            for each in product(implementations, ("plain", "packed", "padded"))
        ]
        cases += [f"{family}/eager/padded/13/checkpoint=", f"{family}/eager/packed/15/checkpoint=reentrant"]
    return cases


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


def facts(world: int, kernels: str, *cases: str) -> dict[str, Any]:
    told = once("facts_of_models.py", f"sp={world}", kernels, *cases, world=world)
    assert not isinstance(told, str), told
    return told[0]


def check(told: dict[str, Any]) -> None:
    errors = {case: fact["error"] for case, fact in told.items() if "error" in fact}
    assert not errors, "\n".join(errors.values())
    assert {case: fact for case, fact in told.items() if fact["worst"] > CLOSE} == {}
    assert all(fact["split"] > 10 and fact["tensors"] > 15 for fact in told.values())


@pytest.mark.parametrize("families", PAIRS)
def test_two_processes_compute_what_one_computes(families: tuple[str, str]) -> None:
    check(facts(2, "eager", *cases_of(*families)))


@pytest.mark.slow
@pytest.mark.parametrize("families", [(each,) for pair in PAIRS for each in pair])
def test_four_processes_compute_what_one_computes(families: tuple[str, ...]) -> None:
    check(facts(4, "eager", *cases_of(*families)))


@pytest.mark.parametrize("world", [2, 4])
def test_heads_losses_and_captured_outputs(world: int) -> None:
    check(facts(world, "torch", *OTHERS))
