"""Which linear layers and experts of a model multiply in float8, and the change of these and back.

They are the ``nn.Linear`` inside of the layers of decoders, found by structure, and modules with stacked
weights that kernels compute as experts. Layers are what lists of
modules hold (of those, what upstream can checkpoint, if it can checkpoint any); layers of encoders, such as
towers, say that their attention is not causal. Outside stay routers and gates, which have an output for each
expert, or one; adapters; layers of other classes, such as quantised ones; and what the setting leaves out.
Embeddings, norms, the head and the loss stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from veomni_hook.kernels.explain.places import places_of
from veomni_hook.kernels.float8.linear import CLASSES
from veomni_hook.kernels.float8.products import widths_refused
from veomni_hook.kernels.float8.setting import Precision, in_force
from veomni_hook.kernels.selection.binding import binding_of, rebind, wanted_by
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.kernels.slot import Slot
from veomni_hook.settings import FLOAT8, FORMATS, MXFP8

__all__ = ["Place", "adapt", "decoders", "format_of", "places", "restore"]

_EXPERTS = "moe_experts"


@dataclass(frozen=True)
class Place:
    """A linear layer, or experts, in a layer of a decoder.

    Attributes:
        name: its name in the model.
        module: itself.
        reason: why it stays; empty: it does not.
        slot: that of experts.
    """

    name: str
    module: nn.Module
    reason: str = ""
    slot: Slot | None = None


def adapt(model: Any, asked: Precision | None = None) -> Any:
    """Return ``model``, whose linear layers and experts now multiply as the setting, or ``asked``, says.

    Mutates: the classes of these layers; experts are bound to the backend of the format's name. Weights,
    names and hooks stay. What multiplies in float8 keeps doing so.
    """
    asked = asked or in_force()
    if asked.format:
        for place in places(model, asked):
            if place.reason or format_of(place.module):
                continue
            if place.slot is not None:
                rebind(place.module, {_EXPERTS: asked.format})
            else:
                place.module.__class__ = CLASSES[asked.format]
    return model


def restore(model: nn.Module) -> None:
    """Give all layers of ``model`` that multiply in float8 their former class, and experts their kernels."""
    for module in model.modules():
        if not format_of(module):
            continue
        if type(module) not in CLASSES.values():
            rebind(module, {_EXPERTS: None})
        else:
            vars(module).pop("plain_because", None)
            setattr(module, "__class__", nn.Linear)  # noqa: B010 - mypy knows no way back to a base


def places(model: nn.Module, asked: Precision | None = None) -> Iterator[Place]:
    """Yield linear layers and experts in the layers of ``model``, with the reasons of those that stay."""
    asked = asked or in_force()
    form = asked.format or FLOAT8
    slots: dict[type, Slot | None] = {}
    for prefix, layers in decoders(model):
        for number, layer in enumerate(layers):
            end = ""
            if number < asked.first or number >= len(layers) - asked.last:
                end = f"the setting leaves out the first {asked.first} and last {asked.last} layers"
            gates = _gates(layer)
            for name, module in layer.named_modules():
                linear = hasattr(module, "in_features") and not hasattr(module, "base_layer")
                slot = None if linear else _slot_of(module, slots)
                if not linear and slot is None:
                    continue  # or it is PEFT's, which holds the one that is meant
                named = next((part for part in asked.skip if f".{part}." in f".{name}."), None)
                reason = end or (named and f"the setting leaves out {named}")
                if slot is None:
                    reason = reason or gates.get(module) or _unfit(layer, name, module, form)
                else:
                    reason = reason or _unfit_experts(module, slot, form)
                yield Place(f"{prefix}.{number}.{name}", module, reason or "", slot)


def decoders(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Return the lists of layers, by name, without those of encoders."""
    lists: list[tuple[str, list[nn.Module]]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and not inside and not _is_encoder(module):
            lists.append((name, list(module)))
    able = [entry for entry in lists if any(hasattr(layer, "gradient_checkpointing") for layer in entry[1])]
    return able or lists


def _is_encoder(layers: nn.Module) -> bool:
    """Whether the attention in ``layers`` says that it is not causal; in decoders, some says that it is."""
    said = {module.is_causal for module in layers.modules() if hasattr(module, "is_causal")}
    return said == {False}


def _gates(layer: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers beside experts that have an output for each of them, or one."""
    gates: dict[nn.Module, str] = {}
    for module in layer.modules():
        for child in module.children():
            number = len(child) if isinstance(child, nn.ModuleList) else _stacked(child)
            if number < 2:
                continue
            for one in module.modules():
                if getattr(one, "out_features", None) in (1, number):
                    gates[one] = "it is a router or a gate"
    return gates


def _stacked(module: nn.Module) -> int:
    """Return how many matrices a weight of ``module`` holds; that of a convolution holds none."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return 0
    return next((len(weight) for weight in module.parameters(recurse=False) if weight.ndim == 3), 0)


def format_of(module: object) -> str:
    """Return what a linear layer, or experts, multiply in, one of `FORMATS`; empty: as upstream."""
    bound = (binding_of(module) or {}).get(_EXPERTS)
    named = (form for form, kind in CLASSES.items() if type(module) is kind or bound == form)
    return next(named, "")


def _slot_of(module: nn.Module, slots: dict[type, Slot | None]) -> Slot | None:
    """Return the slot of experts with stacked weights; ``slots`` are those that are known of classes."""
    kind = type(module)
    if _stacked(module) < 2:
        return None
    if kind not in slots:
        slots[kind] = next((place.slot for place in places_of(kind) if place.slot.op == _EXPERTS), None)
    return slots[kind]


def _unfit_experts(module: nn.Module, slot: Slot, form: str) -> str | None:
    if not any(kernel.backend == form for kernel in registry.kernels(slot.op, slot.variant)):
        return f"experts of the form {slot.variant} have no kernel in {form}"
    wanted = wanted_by(module, _EXPERTS)
    if wanted not in (AUTO, *FORMATS):
        return f"{_EXPERTS}={wanted} was chosen"
    users = registry.op(slot.op).yields
    if users is not None and not format_of(module) and (chosen := load_attribute(users)(module)) is not None:
        return str(chosen)
    weights = (weight for weight in module.parameters(recurse=False) if weight.ndim == 3)
    return next(filter(None, (widths_refused(weight, mx=form == MXFP8) for weight in weights)), None)


def _unfit(layer: nn.Module, name: str, module: Any, form: str) -> str | None:
    if type(module) not in (nn.Linear, *CLASSES.values()):
        return f"it is a {type(module).__name__}"
    owners, parts = [layer], name.split(".")
    for part in parts[:-1]:
        owners.append(owners[-1].get_submodule(part))
    if any(hasattr(owner, "base_layer") for owner in owners) and "base_layer" not in parts:
        return "it is an adapter"
    return widths_refused(module.weight, mx=form == MXFP8)
