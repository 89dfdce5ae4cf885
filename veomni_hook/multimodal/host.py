"""Computes on the host what follows from the sizes of images, videos and sounds.

Upstream computes positions and boundaries on the device, and reads the sizes from it many times: each time
the host waits until the device has done everything before. Here the sizes are copied once (or known, see
`veomni_hook.kernels.shared.host_values`), upstream's own functions compute with the copies on the CPU, and
their results go to the device without waiting. Where sizes are already on the CPU, and while code is traced
or captured, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeGuard, TypeVar

import torch

from veomni_hook.kernels.shared.host_values import (
    host_copies,
    host_copy,
    known_copy,
    note_copy,
    note_origin,
    traced,
)
from veomni_hook.kernels.shared.operand_checks import not_plain

__all__ = [
    "chosen",
    "computed",
    "converted",
    "counted",
    "followed",
    "lengths",
    "made",
    "of_sizes",
    "picked",
    "place",
    "read_together",
    "sent",
    "values",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: The device of tensors without data, beside that of the host.
_ELSEWHERE = ("cpu", "meta")


def computed(
    *precomputed: str, floats: bool = False, known: bool = False
) -> Callable[[_Function], _Function]:
    """Decorate a function of sizes to run on the host; tensors that it returns are where its arguments were.

    Args:
        precomputed: names of results that the function takes from its argument ``kwargs`` if all are there;
            then nothing is read.
        floats: whether floating-point arguments are sizes, too; else they stay on the device.
        known: whether the function runs on the host only where that waits for nothing.
    """

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def on_host(*args: object, **kwargs: Any) -> Any:
            if traced():
                return function(*args, **kwargs)
            keywords = kwargs.get("kwargs") or {}
            if precomputed and all(keywords.get(name) is not None for name in precomputed):
                return function(*args, **kwargs)
            sizes = [argument for argument in (*args, *kwargs.values()) if _is_size(argument, floats=floats)]
            if not sizes or (known and any(known_copy(size) is None for size in sizes)):
                return function(*args, **kwargs)
            host_copies(*sizes)
            args = tuple(
                host_copy(argument) if _is_size(argument, floats=floats) else argument for argument in args
            )
            kwargs = {
                name: host_copy(value) if _is_size(value, floats=floats) else value
                for name, value in kwargs.items()
            }
            return _moved(function(*args, **kwargs), sizes[0].device)

        return on_host  # type: ignore[return-value]

    return decorate


def values(tensor: object) -> Any:
    """Return the copy of ``tensor`` on the host, whose values the caller reads at once."""
    return host_copy(tensor) if _is_size(tensor, floats=True) else tensor


def place(device: object) -> Any:
    """Return where the caller computes what it reads at once: the host; ``device`` while code is traced."""
    return device if traced() else "cpu"


def of_sizes(compute: Callable[..., object], *sizes: object) -> Any:
    """Return ``compute(*sizes)``, computed on the host; tensors of it are where ``sizes`` are."""
    return computed()(compute)(*sizes)


def sent(tensor: object, device: torch.device) -> Any:
    """Return ``tensor``, which the host made, on a device; nobody waits, and reading it costs nothing.

    Numbers and lists are returned as they are.
    """
    if traced() or not isinstance(tensor, torch.Tensor) or device.type in _ELSEWHERE:
        return tensor
    if tensor.device.type != "cpu" or not_plain(tensor):
        return tensor
    # From pageable memory, too, the copy is made before this returns.
    return note_copy(tensor.to(device, non_blocking=True), tensor)


def made(numbers: Any, *, device: Any, **options: Any) -> torch.Tensor:
    """Return ``torch.tensor(numbers, device=device, **options)``; nobody waits for the copy to the device."""
    if traced() or not isinstance(numbers, list | tuple):
        return torch.tensor(numbers, device=device, **options)
    where = torch.empty(0, device=device).device if device is not None else torch.get_default_device()
    tensor: torch.Tensor = sent(torch.tensor(numbers, device="cpu", **options), where)
    return tensor.to(where)  # what has no values, as on the meta device, is not sent


def converted(tensor: object, result: torch.Tensor) -> torch.Tensor:
    """Return ``result``, which is ``tensor`` in another dtype; reading it reads ``tensor``."""
    if not _is_size(tensor, floats=True) or result is tensor:
        return result
    dtype = result.dtype
    return note_origin(result, lambda copy: copy.to(dtype), tensor)


def counted(positions: torch.Tensor, start: object) -> None:
    """Note that ``positions [length]`` are those from ``start`` on, if it is a number: nobody reads them."""
    if _is_size(positions, floats=False) and isinstance(start, int):
        end = start + len(positions)
        note_origin(positions, lambda: torch.arange(start, end, device="cpu"))


def followed(compute: Callable[[Any], torch.Tensor], tensor: object) -> torch.Tensor:
    """Return ``compute(tensor)``; reading it reads ``tensor``."""
    result = compute(tensor)
    return note_origin(result, compute, tensor) if _is_size(tensor, floats=True) else result


def chosen(mask: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return what selects the true elements of ``mask``: their indices, if the host has to know how many."""
    if not _is_size(mask, floats=True):
        return mask.bool()
    indices = host_copy(mask).bool().nonzero(as_tuple=True)
    return tuple(index.to(mask.device, non_blocking=True) for index in indices)


def picked(index: object) -> Any:
    """Return what selects the elements that ``index`` selects; of a mask, the host finds the true ones."""
    return chosen(index) if isinstance(index, torch.Tensor) and index.dtype is torch.bool else index


def lengths(function: _Function) -> _Function:
    """Decorate a function of lengths, which it maps to lengths: reading its results reads its arguments."""

    @wraps(function)
    def with_origins(*args: object, **kwargs: object) -> Any:
        results = function(*args, **kwargs)
        sizes = [(at, argument) for at, argument in enumerate(args) if _is_size(argument, floats=False)]
        if not sizes:
            return results

        def compute(*copies: torch.Tensor) -> Any:
            copy_at = dict(zip((at for at, _ in sizes), copies, strict=True))
            return function(*(copy_at.get(at, argument) for at, argument in enumerate(args)), **kwargs)

        tensors = [size for _, size in sizes]
        if isinstance(results, torch.Tensor):
            return note_origin(results, compute, *tensors)
        for at, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                note_origin(result, lambda *copies, at=at: compute(*copies)[at], *tensors)
        return results

    return with_origins  # type: ignore[return-value]


def read_together(sizes: Iterable[object], positions: Iterable[object] = ()) -> None:
    """Copy to the host, at once, what a forward pass is going to read; without ``sizes`` nothing.

    Args:
        sizes: sizes of images and videos; None: there are none.
        positions: the positions, which say whether samples share a row, or what they are computed from.
    """
    unread = [size for size in sizes if _is_size(size, floats=True)]
    if unread:
        host_copies(*unread, *(position for position in positions if _is_size(position, floats=True)))


def _is_size(value: object, *, floats: bool) -> TypeGuard[torch.Tensor]:
    """Return whether the host may read a value that is on a device; in traced code it is none."""
    return (
        not traced()  # asked first everywhere: dynamo leaves out what follows
        and isinstance(value, torch.Tensor)
        and value.device.type not in _ELSEWHERE
        and not_plain(value) is None
        and (floats or not value.is_floating_point())
    )


def _moved(result: object, device: torch.device) -> Any:
    """Return what a function returned, with its tensors on ``device`` and their values noted."""
    if isinstance(result, tuple):
        return tuple(_moved(part, device) for part in result)
    return sent(result, device)
