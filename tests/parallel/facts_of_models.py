"""How far losses, logits and gradients of split models are from those of one process.

A case is ``family/implementation/kind/length[/options]``. The same model runs twice in each process: whole, and
with its sequences split; gradients are averaged over the processes as DDP does. Models are not changed by the
test's code: the hook patches them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from tests.parallel import small
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.parallel import process


def run(
    model: Any, batch: dict[str, torch.Tensor], sizes: str, options: list[str]
) -> dict[str, torch.Tensor]:
    process.tell(sizes)
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    values = {"loss": output.loss.detach()}
    if "unread" not in options:  # whoever reads logits gets upstream's loss from the next step on
        values["logits"] = output.logits.detach()
    if output.get("hidden_states"):
        values |= {f"hidden {n}": x.detach() for n, x in enumerate(output.hidden_states)}
    gradients = {
        f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    if sizes:
        for each in gradients.values():
            distributed.all_reduce(each)
            each /= distributed.get_world_size()
    return values | gradients


def compare(case: str, sizes: str) -> dict[str, Any]:
    family, implementation, kind, length, *options = case.split("/")
    changes, given, checkpoint = {}, {}, None
    for option in options:
        name, _, value = option.partition("=")
        if name == "checkpoint":
            checkpoint = {"use_reentrant": value == "reentrant"}
        elif name in ("output_hidden_states", "num_items_in_batch"):
            given[name] = json.loads(value)
        elif name != "unread":
            changes[name] = json.loads(value)
    model = small.model(family, implementation, **changes)
    if checkpoint is not None:
        model.gradient_checkpointing_enable(checkpoint)
    batch = {**small.batch(kind, int(length)), **given}
    one, split = run(model, batch, "", options), run(model, batch, sizes, options)
    assert one.keys() == split.keys(), one.keys() ^ split.keys()
    worst, name = max((relative(split[name], one[name]), name) for name in one)
    calls = sum(module.__dict__.get("_veomni_sequence") is not None for module in model.modules())
    return {"worst": worst, "name": name, "tensors": len(one), "split": calls}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
    return error if error == error else 1e9  # not a number


def facts(cases: Sequence[str], sizes: str, kernels: str) -> dict[str, Any]:
    """Return what `compare` found in each case."""
    set_choice(kernels)
    return {case: compare(case, sizes) for case in cases}
