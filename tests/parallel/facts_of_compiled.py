"""How far the gradients of compiled models are from those of one uncompiled process."""

from __future__ import annotations

import torch

from tests.parallel import small
from tests.parallel.facts_of_models import run


def compared(kind: str, family: str, sizes: str = "sp=2") -> float:
    torch._dynamo.reset()
    model, batch = small.model(family), small.batch("plain", 15)
    one = run(model, batch, "", [])
    called = model
    if kind == "model":
        called = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
    split = [run(called, batch, sizes, []) for _ in range(2)]
    plain = [{name.replace("_orig_mod.", ""): each for name, each in found.items()} for found in split]
    return max(small.worst(found, one)[0] for found in plain)
