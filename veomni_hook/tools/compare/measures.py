"""What is measured in a process: time by the clock of its device, and peak memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from veomni_hook import accelerator

__all__ = ["Moment", "device_name", "is_capturing", "peak_memory", "seconds_of"]

KIBIBYTE = 1024


class Moment:
    """A point in time on the host, and on an accelerator an event in its queue, without a wait for it."""

    def __init__(self, device: str) -> None:
        self.host = time.perf_counter()
        self.event: Any = None
        module = accelerator.module(device)
        if module is not None:
            self.event = module.Event(enable_timing=True)
            self.event.record()


def seconds_of(moments: Sequence[Moment], end: Moment, device: str) -> list[float]:
    """Return when each moment was, in seconds before ``end``.

    Waits for the device. Uses the device's clock if all moments have an event, else the host's.
    """
    module = accelerator.module(device)
    if module is not None and end.event is not None and all(moment.event is not None for moment in moments):
        module.synchronize()
        return [moment.event.elapsed_time(end.event) / 1e3 for moment in moments]
    return [end.host - moment.host for moment in moments]


def is_capturing(device: str) -> bool:
    """Whether a graph of the device is being captured, during which no event may be recorded."""
    asked = getattr(accelerator.module(device), "is_current_stream_capturing", None)
    return bool(asked is not None and asked())


def device_name(device: str) -> str:
    """Return the display name of the device."""
    module = accelerator.module(device)
    return device if module is None else str(module.get_device_name())


def peak_memory(device: str) -> tuple[str, int | None]:
    """Return what was measured (``device`` or ``resident``) and the peak in bytes.

    On an accelerator it is the largest size of all tensors, summed over all devices of the process; else the
    resident set of the process. None if the system does not report it.
    """
    module = accelerator.module(device)
    if module is not None:
        return "device", sum(module.max_memory_allocated(index) for index in range(module.device_count()))
    return "resident", _resident()


def _resident() -> int | None:
    # getrusage begins with the peak of the process that started this one, so it comes second.
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * KIBIBYTE
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIBIBYTE
