"""The prover of eager attention functions: the module's own function, through ``slot.at``."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import nn

from tests.proof.compare import MODE
from tests.proof.provers import Proof, Tally, Unreached, both, slots_of

BATCH, HEADS, KEY_HEADS, LENGTH, WIDTH = 2, 4, 2, 5, 8
SOFTCAP = 2.0


class Attention(nn.Module):
    """What an eager attention function reads of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.num_key_value_groups = HEADS // KEY_HEADS
        self.head_dim = WIDTH
        self.sinks = nn.Parameter(torch.randn(HEADS))


def prove_eager_attention(site: Any, module: Any) -> Proof:
    """Prove the function: without and with a mask, and every argument that it has a default for."""
    upstream = getattr(module, site.target)
    slots = [slot for slot in slots_of(module, site.op) if slot.variant == site.variant]
    if not slots:
        raise Unreached("the module has no slot for it")
    names = inspect.signature(upstream).parameters
    optional = [{"scaling": 0.3}]
    if "softcap" in names:
        optional = [{"scaling": 0.3, "softcap": SOFTCAP}, {"scaling": None, "softcap": None}]
    tally = Tally(site.variant)
    for dtype, masked, extra, slot in itertools.product(MODE.dtypes, (False, True), optional, slots):
        owner = Attention().to(dtype)
        heads = {"query": HEADS, "key": KEY_HEADS, "value": KEY_HEADS}
        states = {n: torch.randn(BATCH, number, LENGTH, WIDTH).to(dtype) for n, number in heads.items()}
        mask = torch.full((BATCH, 1, LENGTH, LENGTH), torch.finfo(dtype).min).triu(1).to(dtype)

        def call(
            mask: Any = mask if masked else None,
            owner: nn.Module = owner,
            slot: Any = slot,
            extra: Any = extra,
            **states: torch.Tensor,
        ) -> Any:
            return slot.at(owner, upstream)(owner, *states.values(), mask, **extra, s_aux=None)

        expected, found, taken, refused = both([slot], owner, call, states)
        if not taken:
            raise Unreached(f"the guard was not taken: {refused}")
        tally.add(expected, found, taken, dtype, states)
    return tally.proof()
