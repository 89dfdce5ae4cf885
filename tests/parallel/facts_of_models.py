"""How far losses, logits and gradients of split models are from those of one process.

A case is ``family/implementation/kind/length[/options]``. The same model runs twice in each process: whole, and
with its sequences split; gradients are averaged over the processes as DDP does. Models are not changed by the
test's code: the hook patches them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tests.parallel import small
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.parallel import attention, process


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
    return values | {f"gradient of {name}": each for name, each in small.gradients(model, sizes).items()}


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
    one = run(model, batch, "", options)
    with rings() as sizes_of_rings:
        split = run(model, batch, sizes, options)
    worst, name = small.worst(split, one)
    calls = sum(module.__dict__.get("_veomni_sequence") is not None for module in model.modules())
    return {
        "worst": worst, "name": name, "tensors": len(one), "split": calls, "rings": sorted(sizes_of_rings),
    }  # fmt: skip


@contextmanager
def rings() -> Iterator[set[int]]:
    """Yield how many processes there are in the rings around which keys go meanwhile."""
    sizes, upstream = set(), attention.ring_attention

    def noted(*operands: Any, **others: Any) -> torch.Tensor:
        sizes.add(operands[6].size)
        return upstream(*operands, **others)

    attention.ring_attention = noted
    try:
        yield sizes
    finally:
        attention.ring_attention = upstream


def facts(cases: Sequence[str], sizes: str, kernels: str) -> dict[str, Any]:
    """Return what `compare` found in each case."""
    set_choice(kernels)
    return {case: compare(case, sizes) for case in cases}
