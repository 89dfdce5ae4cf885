"""A profile of one step: the time of what kernels leave as it is, and how long the device computed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch._C._autograd import DeviceType, _profiler_enabled
from torch.profiler import ProfilerActivity

from veomni_hook import accelerator

__all__ = ["StepProfile", "covered"]

#: In names of operators, torch's and flash-attn's: they compute matrix products, convolutions or attention.
KEPT = re.compile(r"mm(_|$)|convolution|attention|flash_attn")
_ACTIVITIES = {"cpu": [ProfilerActivity.CPU], "cuda": [ProfilerActivity.CPU, ProfilerActivity.CUDA]}


class StepProfile:
    """The profile of what runs from now to `end`, of the device type ``device``.

    There is none on other devices than the CPU and CUDA's, and none while the script profiles itself.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._profile: Any = None
        if device in _ACTIVITIES and not _profiler_enabled():
            self._profile = torch.profiler.profile(activities=_ACTIVITIES[device])
            self._profile.start()

    def end(self) -> dict[str, float] | None:
        """Return seconds: ``kept`` of products and attention, and ``busy``, in which the device computed.

        On a CPU, all time counts as busy, and ``busy`` is left out. Waits for the device.
        """
        if self._profile is None:
            return None
        if (module := accelerator.module(self._device)) is not None:
            module.synchronize()
        self._profile.stop()
        on_device = self._device != "cpu"
        kept = sum(
            event.self_device_time_total if on_device else event.self_cpu_time_total
            for event in self._profile.key_averages()
            if KEPT.search(event.key) and "autograd::" not in event.key
        )
        seconds = {"kept": kept / 1e6}
        if on_device:
            seconds["busy"] = covered(_spans(self._profile.events())) / 1e6
        return seconds


def _spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Return the begin and the end, in microseconds, of what ran on the device."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type != DeviceType.CPU
        # A range of the host's code that is shown on the device, such as the optimizer's.
        and not getattr(event, "is_user_annotation", False)
    ]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans: streams overlap."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return length
