"""Values of small tensors on the host: read from the device once, or known because they came from there.

Reading a tensor of a GPU makes the host wait until the GPU has computed it. The sizes of images and the
boundaries of segments are read many times in a step, and they never change. So their values are kept by
tensor, as long as it lives, and belong to its version: a tensor that was changed in place is read again. Of a
part of a known tensor (a view, as a row of positions) they are known, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch

__all__ = [
    "derived",
    "host_copies",
    "host_copy",
    "known_copy",
    "known_derived",
    "note_copy",
    "note_derived",
    "note_number",
    "note_origin",
    "traced",
]

_Value = TypeVar("_Value")


@dataclass(slots=True)
class _Known:
    """What is known of a tensor."""

    tensor: Callable[[], torch.Tensor | None]
    version: int
    copy: torch.Tensor | None = None
    #: Makes the copy from others: of what the tensor was computed from.
    #: None if these were changed since.
    origin: Callable[[], torch.Tensor | None] | None = None
    #: Whether that makes nobody wait.
    origin_known: Callable[[], bool] = bool
    derived: dict[Any, Any] = field(default_factory=dict)


_KNOWN: dict[int, _Known] = {}


# Asked first wherever values are: dynamo leaves out what follows, here and there.
def traced() -> bool:
    """Return whether this code is traced, or captured as a CUDA graph, so that values are unknown."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    # A stream is asked only where there are streams: the question would make a CUDA context.
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of ``tensor`` on the CPU; the first call for a tensor of a device waits for it.

    A tensor on the CPU is returned itself. Nobody may change the result.
    """
    if tensor.device.type == "cpu":
        return tensor
    known = _known(tensor)
    if known.copy is not None:
        return known.copy
    followed = _of_base(tensor) if known.origin is None else known.origin()
    copy = tensor.detach().to("cpu") if followed is None else followed
    known.origin, known.origin_known = None, bool
    if not tensor.is_inference():
        known.copy = copy
    return copy


def host_copies(*tensors: torch.Tensor) -> None:
    """Copy the values of ``tensors`` of one device to the host, waiting once; known ones are left out."""
    missing = [tensor for tensor in tensors if known_copy(tensor) is None]
    if len(missing) < 2:
        for missed in missing:
            host_copy(missed)
        return
    parts = [missed.detach().contiguous().flatten().view(torch.uint8) for missed in missing]
    together = torch.split(torch.cat(parts).to("cpu"), [part.numel() for part in parts])
    for tensor, part in zip(missing, together, strict=True):
        # A copy of its own: the part may begin where a value of this dtype cannot.
        note_copy(tensor, part.clone().view(tensor.dtype).view(tensor.shape))


def known_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of ``tensor`` on the CPU if nothing has to wait for them, else None."""
    if tensor.device.type == "cpu":
        return tensor
    known = _known(tensor)
    if known.copy is None and known.origin_known():
        return host_copy(tensor)
    return _of_base(tensor) if known.copy is None else known.copy


def note_copy(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Note that ``copy``, on the CPU, has the values of ``tensor``, and return ``tensor``."""
    if tensor.device.type != "cpu":
        _known(tensor).copy = copy
    return tensor


def note_origin(
    tensor: torch.Tensor, compute: Callable[..., torch.Tensor], *origins: torch.Tensor
) -> torch.Tensor:
    """Note that ``tensor`` has the values of ``compute(*origins)``, which costs nothing until they are read.

    Reading them then waits for ``origins`` only, whose values may be known. Returns ``tensor``.
    """
    if tensor.device.type != "cpu":
        known, versions = _known(tensor), [_version(origin) for origin in origins]

        def unchanged() -> bool:
            return [_version(origin) for origin in origins] == versions

        known.origin = lambda: compute(*map(host_copy, origins)) if unchanged() else None
        known.origin_known = lambda: unchanged() and all(known_copy(origin) is not None for origin in origins)
    return tensor


def derived(tensor: torch.Tensor, make: Callable[..., _Value], *arguments: object) -> _Value:
    """Return ``make(host_copy(tensor), *arguments)``, computed once for a tensor; arguments are hashable."""
    if tensor.is_inference():
        return make(host_copy(tensor), *arguments)
    values = _known(tensor).derived
    key = (make, *arguments)
    if key not in values:
        values[key] = make(host_copy(tensor), *arguments)
    value: _Value = _arrived(values, key)
    return value


def note_derived(
    tensor: torch.Tensor, value: object, make: Callable[..., object], *arguments: object
) -> None:
    """Note that ``make(host_copy(tensor), *arguments)`` is ``value``, which somebody else has counted."""
    if not tensor.is_inference():
        _known(tensor).derived[make, *arguments] = value


def note_number(
    tensor: torch.Tensor, number: torch.Tensor, make: Callable[..., int], *arguments: object
) -> None:
    """Note that ``make(host_copy(tensor), *arguments)`` is ``number``, an element that the device computes.

    It travels to the host from now on. Whoever asks for it waits for its arrival alone, and not for what the
    device was told since.
    """
    if tensor.is_inference():
        return
    if number.device.type == "cpu":
        note_derived(tensor, int(number), make, *arguments)
        return
    copy = number.to("cpu", non_blocking=True)
    copied = torch.Event(number.device)
    copied.record()
    note_derived(tensor, _Coming(copy, copied), make, *arguments)


@dataclass(slots=True)
class _Coming:
    """A number on its way to the host."""

    copy: torch.Tensor
    copied: Any


def known_derived(tensor: torch.Tensor, make: Callable[..., _Value], *arguments: object) -> _Value | None:
    """Return what `derived` returns, if it is known, or is a number on its way; else None at once."""
    known = _KNOWN.get(id(tensor))
    if known is None or known.tensor() is not tensor or known.version != _version(tensor):
        return None
    key = (make, *arguments)
    value: _Value | None = _arrived(known.derived, key) if key in known.derived else None
    return value


def _arrived(values: dict[Any, Any], key: object) -> Any:
    value = values[key]
    if isinstance(value, _Coming):
        value.copied.synchronize()
        value = values[key] = int(value.copy)
    return value


def _of_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a view, if those of the tensor that it shows a part of are known."""
    base = tensor._base
    if base is None or base.dtype is not tensor.dtype or base.device != tensor.device:
        return None
    copy = known_copy(base)
    if copy is None or copy.stride() != base.stride():
        return None
    start = tensor.storage_offset() - base.storage_offset() + copy.storage_offset()
    return copy.as_strided(tensor.shape, tensor.stride(), start)


def _known(tensor: torch.Tensor) -> _Known:
    number = id(tensor)
    version = _version(tensor)
    known = _KNOWN.get(number)
    if known is None or known.version != version or known.tensor() is not tensor:
        # A method of the dictionary, because globals are gone when the interpreter ends. Its second argument,
        # what it returns for an absent key, is the dead reference.
        known = _KNOWN[number] = _Known(ref(tensor, partial(_KNOWN.pop, number)), version)
    return known


def _version(tensor: torch.Tensor) -> int:
    # Tensors of inference mode have none, so what was read of them is not kept.
    return 0 if tensor.is_inference() else tensor._version
