"""Towers of images, videos and sounds where only one rank's batch has some: FSDP2 and DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.multimodal.facts_of_absent import small
from tests.multimodal.families import accepted, batch, model
from tests.parallel.small import relative
from veomni_hook.kernels.selection.process_choice import set_active, set_choice
from veomni_hook.parallel import process

TOWERS = ("visual", "audio_tower")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
#: What a rank's batch has.
PARTS: dict[str, list[list[tuple[str, Any]]]] = {
    "text": [[("text", 7)], [("text", 9)]],
    "image": [[("text", 3), ("image", (1, 4, 6)), ("text", 4)]],
    "video": [[("text", 3), ("video", (2, 4, 4)), ("text", 5)]],
    "audio": [[("text", 3), ("audio", 130), ("text", 4)]],
}


def towers_of(made: Any) -> dict[str, Any]:
    """The towers by name; releases differ in where they are."""
    holder = made.model if hasattr(made.model, TOWERS[0]) else made
    return {name: getattr(holder, name) for name in TOWERS if hasattr(holder, name)}


def wrapped(made: Any, arrangement: str) -> Any:
    """Return the model as the ranks share it."""
    towers = list(towers_of(made).values())
    if arrangement.startswith("DDP"):
        return DistributedDataParallel(made, find_unused_parameters="unused" in arrangement)
    units: list[Any] = (
        [] if arrangement == "root" else list(getattr(made.model, "language_model", made.model).layers)
    )
    for tower in towers:
        tower.requires_grad_("frozen" not in arrangement)
        units += (getattr(tower, "blocks", None) or tower.layers) if "blocks" in arrangement else []
        units += [tower] if "tower" in arrangement else []
    policy = HALF if "half" in arrangement else MixedPrecisionPolicy()
    for unit in units:
        fully_shard(unit, mp_policy=policy)
    return fully_shard(made, mp_policy=policy)


def gradients(made: Any) -> dict[str, torch.Tensor]:
    """The gradients by name; DTensors as a whole."""
    found = {}
    for name, each in made.named_parameters():
        gradient = each.grad
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[name.removeprefix("module.")] = whole.detach().clone()
    return found


def step(made: Any, inputs: dict[str, Any], *, inside: Any = None) -> float:
    """Run a training step; ``inside`` wraps the call."""
    made.zero_grad()
    loss = inside(made, inputs) if inside else made(**inputs, use_cache=False).loss
    loss.backward()
    return loss.item()


def in_a_checkpoint(made: Any, inputs: dict[str, Any], *, reentrant: bool) -> torch.Tensor:
    """The loss of a model whose decoder part, with the towers, runs in a checkpoint."""
    inner = made.module.model if isinstance(made, DistributedDataParallel) else made.model
    own = inner.forward

    def forward(**given: Any) -> Any:
        anchor = torch.zeros((), requires_grad=True)

        outputs = {}

        def body(_: torch.Tensor) -> torch.Tensor:
            outputs["own"] = own(**given)
            return outputs["own"].last_hidden_state

        hidden = torch.utils.checkpoint.checkpoint(body, anchor, use_reentrant=reentrant)
        return type(outputs["own"])(**{**outputs["own"], "last_hidden_state": hidden})

    inner.forward = forward
    try:
        return made(**inputs, use_cache=False).loss
    finally:
        # The backward pass has its own reference to the forward.
        del inner.forward


def choose(kernels: str) -> None:
    """Choose kernels; ``off``: patched modules run upstream's code, as after ``deactivate()``."""
    set_active(kernels != "off")
    set_choice("eager" if kernels == "off" else kernels)


def facts(
    family: str, arrangement: str, parts: list[str], checkpoints: str = "", kernels: str = "torch"
) -> dict[str, Any]:
    """Return how far a step of two ranks is from upstream's steps in one process, and the calls of towers."""
    rank = distributed.get_rank()
    alone = model(family)
    # Now: the first import of a model tells the settings of the server.
    process.tell("")
    set_choice("eager")
    batches = [accepted(alone, batch(family, PARTS[part])) for part in parts]
    losses, every = [], []
    for inputs in batches:
        losses.append(step(alone, inputs))
        every.append(gradients(alone))
    expected = {
        name: sum(each.get(name, torch.zeros(())) for each in every) / len(every)
        for name in {name for each in every for name in each}
    }
    choose(kernels)
    made = model(family)
    if checkpoints.startswith("layers"):
        made.gradient_checkpointing_enable({"use_reentrant": "reentrant" in checkpoints})
    if checkpoints == "layers, reentrant":
        made.enable_input_require_grads()
    counts = dict.fromkeys(towers_of(made), 0)
    for name, tower in towers_of(made).items():

        def counted(*_: Any, name: str = name) -> None:
            counts[name] += 1

        tower.register_forward_pre_hook(counted)
    shared = wrapped(made, arrangement)
    inside = None
    if checkpoints in ("whole", "whole, reentrant"):

        def inside(made: Any, inputs: dict[str, Any]) -> torch.Tensor:
            return in_a_checkpoint(made, inputs, reentrant="reentrant" in checkpoints)

    state = torch.get_rng_state()
    loss = step(shared, batches[rank], inside=inside)
    found = gradients(shared)
    if "frozen" in arrangement:
        expected = {name: each for name, each in expected.items() if not any(t in name for t in TOWERS)}
    return {
        "loss": abs(loss - losses[rank]),
        "gradients": max(
            relative(found.get(name, torch.zeros_like(each)), each) for name, each in expected.items()
        ),
        "more": max((found[n].abs().max().item() for n in found.keys() - expected.keys()), default=0.0),
        "calls": counts,
        "random": bool(torch.equal(state, torch.get_rng_state())),
    }


def evaluated(family: str, arrangement: str, kernels: str = "torch") -> dict[str, Any]:
    """Return how far the logits of two ranks in evaluation are from upstream's, and the calls of the tower."""
    part = ("image", "text")[distributed.get_rank()]
    set_choice("eager")
    alone = model(family).eval()
    inputs = accepted(alone, batch(family, PARTS[part]))
    choose(kernels)
    made = model(family)
    calls: list[str] = []
    towers_of(made)["visual"].register_forward_pre_hook(lambda *_: calls.append(part))
    shared = wrapped(made, arrangement).eval()
    with torch.no_grad():
        truth, found = (each(**inputs, use_cache=False).logits for each in (alone, shared))
    return {"logits": relative(found, truth), "calls": len(calls)}


def sized(kernels: str) -> dict[str, Any]:
    """How far two ranks, one with an image of a size of its own and one with text, are from one process."""
    made = small("mistral3")
    # Now: the first import of a model tells the settings of the server.
    process.tell("")
    set_choice("eager")
    text = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "use_cache": False}
    image = {
        "input_ids": torch.tensor([[5, 10, 10, 8]]),
        "pixel_values": torch.linspace(-1, 1, 3 * 8 * 16).view(1, 3, 8, 16),
        "image_sizes": torch.tensor([[8, 16]]),
        "use_cache": False,
    }
    expected: dict[str, torch.Tensor] = {}
    for inputs in (image, text):
        alone = small("mistral3")
        alone(**inputs).last_hidden_state.square().sum().backward()
        for name, each in gradients(alone).items():
            expected[name] = expected.get(name, torch.zeros_like(each)) + each / 2
    set_choice(kernels)
    # Not the tower's layers: transformers does not find their hidden states in classes of FSDP2.
    for unit in (made.multi_modal_projector, *made.language_model.layers, made):
        fully_shard(unit)
    made(**(image, text)[distributed.get_rank()]).last_hidden_state.square().sum().backward()
    found = gradients(made)
    assert found.keys() == expected.keys()
    return {"gradients": max(relative(found[name], each) for name, each in expected.items())}
