"""Routes where processes share sequences or experts."""

from __future__ import annotations

from typing import Any

import torch

from tests.parallel import small
from veomni_hook.parallel import process
from veomni_hook.routing import Routes, monitor, record, replay


def _other(routes: Routes, experts: int) -> Routes:
    """Experts that no router would choose by itself, for every token others."""
    ids = {
        name: (routes[name].long() + 1 + torch.arange(len(routes[name]))[:, None]) % experts
        for name in routes.calls
    }
    return Routes(ids, experts)


def _passes(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), small.gradients(model, "sp=2")


def shared_sequences(checkpointing: bool) -> dict[str, Any]:
    """Whole routes for a pass that two processes share, and routes recorded in one, against one process."""
    process.tell("")
    model = small.model("qwen3_moe").train()
    tokens = torch.randint(3, small.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    with record(model) as chosen, torch.no_grad():
        model(**batch)
    given = _other(chosen, 4)
    with replay(model, given), monitor(model) as load:
        expected = _passes(model, batch)
    process.tell("sp=2")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with record(model) as recorded, replay(model, given), monitor(model) as counted:
        found = _passes(model, batch)
    counted.reduce()
    process.tell("")
    return {
        "loss": abs(found[0] - expected[0]),
        "gradients": small.worst(found[1], expected[1])[0],
        "recorded": all(torch.equal(recorded[name], given[name]) for name in given.calls),
        "counted": all(torch.equal(counted.counts[name], of) for name, of in load.counts.items()),
        "tokens": [int(each) for each in counted.tokens.values()],
        "entropy": max(abs(float(counted.entropy()[name] - of)) for name, of in load.entropy().items()),
    }
