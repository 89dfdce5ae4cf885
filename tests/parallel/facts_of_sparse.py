"""What two processes see that share the sequences of a model with an indexer."""

from __future__ import annotations

import types
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import veomni_hook
from tests.parallel import small
from tests.parallel.small import refusal
from veomni_hook.parallel import process

#: Positions of a batch in which what grows with their square is nearly everything.
_LONG = 512


def _changed(change: Any) -> str:
    """What training answers if ``change`` wraps the forward of attention."""
    model = small.model("deepseek_v4", "eager")
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(change, layer.self_attn)
    return refusal(lambda: model(**small.batch("plain", rows=1)))


def mask() -> str:
    """A mask of blocks, as flex attention has it."""

    def forward(self: Any, *args: Any, attention_mask: Any, **named: Any) -> Any:
        return type(self).forward(self, *args, attention_mask={"all": attention_mask}, **named)

    return _changed(forward)


def queries() -> str:
    """A mask of all queries, which another patch has kept."""
    from veomni_hook.parallel.whole_keys import own_queries

    def forward(self: Any, *args: Any, attention_mask: Any, **named: Any) -> Any:
        own_queries(self, torch.ones(1, 1, 8, 1), torch.ones(1, 1, 16, 1), attention_mask)

    return _changed(forward)


def products(family: str) -> list[int]:
    """Operations of a forward and a backward pass, in one process and in one of two."""
    changes = {"max_position_embeddings": _LONG}
    batch = small.batch("plain", _LONG, rows=1)
    counts = []
    for sizes in ("", "sp=2"):
        process.tell(sizes)
        model = small.model(family, "eager", **changes)
        with FlopCounterMode(display=False) as counter:
            model(**batch).loss.backward()
        counts.append(counter.get_total_flops())
    return counts


def facts() -> dict[str, Any]:
    """Return what each check found, in one process after the other."""
    refusals = {check.__name__: check() for check in (mask, queries)}
    process.tell("sp=2")
    return {
        "refusals": refusals,
        "explain": str(veomni_hook.explain(small.model("deepseek_v4", "eager"))),
        "products": {
            name: products(name)
            for name in ("deepseek_v32", "deepseek_v4")
            if find_spec(f"transformers.models.{name}")
        },
    }
