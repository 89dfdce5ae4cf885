"""Which linear layers of a model multiply in float8, and the change of these and back.

They are the ``nn.Linear`` inside of the layers of decoders, found by structure. Layers are what lists of
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

from veomni_hook.kernels.float8.linear import Float8Linear, widths_refused
from veomni_hook.kernels.float8.setting import Precision, in_force

__all__ = ["Place", "adapt", "decoders", "places", "restore"]


@dataclass(frozen=True)
class Place:
    """A linear layer in a layer of a decoder: its name in the model, and why it stays; empty: it does not."""

    name: str
    module: nn.Module
    reason: str = ""


def adapt(model: Any, asked: Precision | None = None) -> Any:
    """Return ``model``, whose linear layers now multiply as the setting, or ``asked``, says.

    Mutates: the classes of these layers. Weights, names and hooks stay. Layers that multiply in float8 keep
    doing so.
    """
    asked = asked or in_force()
    if asked.float8:
        for place in places(model, asked):
            if not place.reason:
                place.module.__class__ = Float8Linear
    return model


def restore(model: nn.Module) -> None:
    """Give all layers of ``model`` that multiply in float8 their former class."""
    for module in model.modules():
        if type(module) is Float8Linear:
            vars(module).pop("plain_because", None)
            setattr(module, "__class__", nn.Linear)  # noqa: B010 - mypy knows no way back to a base


def places(model: nn.Module, asked: Precision | None = None) -> Iterator[Place]:
    """Yield the linear layers inside of the layers of ``model``, with the reasons of those that stay."""
    asked = asked or in_force()
    for prefix, layers in decoders(model):
        for number, layer in enumerate(layers):
            end = ""
            if number < asked.first or number >= len(layers) - asked.last:
                end = f"the setting leaves out the first {asked.first} and last {asked.last} layers"
            gates = _gates(layer)
            for name, module in layer.named_modules():
                if not hasattr(module, "in_features") or hasattr(module, "base_layer"):
                    continue  # PEFT's layers hold the one that is meant
                named = next((part for part in asked.skip if f".{part}." in f".{name}."), None)
                reason = end or (named and f"the setting leaves out {named}")
                reason = reason or gates.get(module) or _unfit(layer, name, module)
                yield Place(f"{prefix}.{number}.{name}", module, reason or "")


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
    """Return how many matrices a weight of ``module`` holds."""
    return next((len(weight) for weight in module.parameters(recurse=False) if weight.ndim == 3), 0)


def _unfit(layer: nn.Module, name: str, module: Any) -> str | None:
    if type(module) is not nn.Linear and type(module) is not Float8Linear:
        return f"it is a {type(module).__name__}"
    owners = [layer, *(layer.get_submodule(part) for part in _prefixes(name))]
    if any(hasattr(owner, "base_layer") for owner in owners) and "base_layer" not in name.split("."):
        return "it is an adapter"
    return widths_refused(module.weight)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
