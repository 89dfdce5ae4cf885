"""Prints how far losses, logits and gradients of split models are from those of one process.

Arguments: the sizes, the kernels, then cases ``family/implementation/kind/length[/options]``. The same model runs twice in
each process: whole, and with its sequences split; gradients are averaged over the processes as DDP does.
Models are not changed by the test's code: the hook patches them.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import veomni_hook

SIZES, KERNELS = sys.argv[1:3] if __name__ == "__main__" else ("", "")
if SIZES:
    veomni_hook.activate(parallel=SIZES, kernels=KERNELS)

import torch  # noqa: E402
from torch import distributed  # noqa: E402

from tests.parallel import small  # noqa: E402
from tests.parallel.job import begin  # noqa: E402
from veomni_hook.parallel import process  # noqa: E402


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


def compare(case: str) -> dict[str, Any]:
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
    one, split = run(model, batch, "", options), run(model, batch, SIZES, options)
    assert one.keys() == split.keys(), one.keys() ^ split.keys()
    worst, name = max((relative(split[name], one[name]), name) for name in one)
    calls = sum(module.__dict__.get("_veomni_sequence") is not None for module in model.modules())
    return {"worst": worst, "name": name, "tensors": len(one), "split": calls}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
    return error if error == error else 1e9  # not a number


def facts(case: str) -> dict[str, Any]:
    try:
        return compare(case)
    except Exception:
        return {"error": traceback.format_exc()[-3000:]}


if __name__ == "__main__":
    begin()
    result = {case: facts(case) for case in sys.argv[3:]}
    distributed.destroy_process_group()
    print(json.dumps(result))
