"""What the setting ``memory`` does in a model, as lines of `veomni_hook.explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from veomni_hook.finders.state import STATE
from veomni_hook.layout import counted
from veomni_hook.sizes import readable

if TYPE_CHECKING:
    from torch import nn

    from veomni_hook.memory.parts import Parts

__all__ = ["notes_on_memory"]

_OP, _FLAG = "tiles", "gradient_checkpointing"


def notes_on_memory(model: nn.Module) -> Iterator[str]:
    """Yield lines for each part of the setting that is on; none if none is."""
    from veomni_hook.memory.parts import in_force

    asked = in_force()
    if asked.budget is not None:
        from veomni_hook.memory.budget import chosen_for

        most = readable(asked.budget) if asked.budget else "what the device has"
        later = "parts are chosen at its first call in training, outside of compiled code"
        yield f"memory: a step may take {most}: {chosen_for(model) or later}"
    if asked.checkpoint:
        yield _checkpoints(model, asked)
    if asked.tiles:
        yield from _tiles(model)


def _checkpoints(model: nn.Module, asked: Parts) -> str:
    from veomni_hook.memory.checkpoint import run

    able = [module for module in model.modules() if hasattr(module, _FLAG)]
    # A model has the flag, too, but its layers are what is called again.
    able = [one for one in able if not any(hasattr(part, _FLAG) for part in [*one.modules()][1:])]
    layers = [module for module in able if module.gradient_checkpointing]
    functions = [vars(module).get("_gradient_checkpointing_func") for module in layers]
    # One that is partial has options of torch's checkpoint.
    ours = [layer for layer, own in zip(layers, functions, strict=True) if getattr(own, "func", own) is run]
    if not ours:
        why = "the script disabled it" if able else f"{type(model).__name__} has no such layers"
        why = "it was made before the setting was in force, or another function was set" if layers else why
        return f"memory: no layer is checkpointed: {why}"
    counts = Counter(type(layer).__name__ for layer in ours)
    names = ", ".join(f"{number} {name}" for name, number in counts.items())
    kept = "on the host" if asked.offload else "on the device"
    return f"memory: checkpointed: {names}; their inputs, and what attention computed, are kept {kept}"


def _tiles(model: nn.Module) -> Iterator[str]:
    counts: Counter[str] = Counter()
    missed: dict[str, str] = {}
    for module in model.modules():
        for owner in type(module).__mro__:
            outcome = STATE.outcomes.get(owner.__module__)
            report = {} if outcome is None or not outcome.patched else outcome.report
            target = f"{owner.__name__}.forward"
            applied = [patch["target"] for patch in report.get("applied", ()) if patch.get("op") == _OP]
            if target in applied:
                counts[owner.__name__] += 1
            for site in report.get("missed", ()):
                if site["op"] == _OP and site["target"] == target:
                    missed[owner.__name__] = site["reason"]
    if counts:
        names = ", ".join(f"{name} ({counted(number, 'module')})" for name, number in counts.items())
        yield f"memory: in tiles of positions where rows are many: {names}"
    else:
        alone = "memory: no module of it is known to work on each position by itself"
        yield f"{alone}, so only the loss, and experts, take fewer rows"
    for name, reason in missed.items():
        yield f"memory: {name} runs on all positions at once: {reason}"
