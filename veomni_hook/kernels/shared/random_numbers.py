"""Where a device's random numbers are: to see whether code has drawn some."""

from __future__ import annotations

from collections.abc import Hashable

import torch

__all__ = ["place_of"]


def place_of(device: torch.device) -> Hashable:
    """Return the state of the generator that code on ``device`` draws from; nothing waits for the device."""
    if device.type == "cpu":
        return torch.default_generator.get_state().numpy().tobytes()
    home = torch.get_device_module(device)
    generator = home.default_generators[home.current_device() if device.index is None else device.index]
    return generator.initial_seed(), generator.get_offset()
