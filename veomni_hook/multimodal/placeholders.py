"""The smallest inputs that a tower of images, videos or sounds takes, for batches that have none.

Sizes are read from the tower's first layer and from its configuration; no value is read from the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

__all__ = ["Underivable", "placeholders"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MERGES = ("spatial_merge_size", "merge_kernel_size")
#: The stride of the convolutions in front of an audio tower whose positions are learned.
_AUDIO_STRIDE = 2


class Underivable(Exception):
    """The configuration does not say how large the smallest input is; the text says what is missing."""


def placeholders(
    names: Sequence[str], towers: Iterable[nn.Module], *, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor | None]:
    """Return one value for each argument.

    Args:
        names: the arguments, as upstream calls them: pixels and a grid, pixels alone, or audio features and
            what says their lengths.
        towers: the modules that use them, the tower first.
        dtype: the dtype of pixels and features.
        device: of all values.

    Returns:
        Zeros for pixels ``[patches, width]`` or ``[1, channels, size, size]`` and features ``[1, bins,
        frames]``; int64 for the grid ``[1, 3]`` (1, 2m, 2m), where m is the size of a merged square, and for
        masks ``[1, frames]``; None for lengths, which follow from masks.

    Raises:
        Underivable: the towers do not say the sizes.
    """
    towers = list(towers)
    made: dict[str, torch.Tensor | None]
    if any(name.endswith("grid_thw") for name in names):
        side = 2 * _merge(towers)
        grid = torch.tensor([[1, side, side]], device=device)
        pixels = torch.zeros(side**2, *_patch(towers), dtype=dtype, device=device)
        made = {name: grid if name.endswith("grid_thw") else pixels for name in names}
    elif names[0] == "input_features":
        bins, frames = _spectrum(towers)
        mask = torch.ones(1, frames, dtype=torch.int64, device=device)
        features = torch.zeros(1, bins, frames, dtype=dtype, device=device)
        made = dict.fromkeys(names, None) | {each: mask for each in names if each.endswith("mask")}
        made["input_features"] = features
    else:
        made = {names[0]: torch.zeros(1, *_image(towers), dtype=dtype, device=device)}
    return [made[name] for name in names]


def _merge(towers: Sequence[nn.Module]) -> int:
    for name in _MERGES:
        size = _told(towers, name)
        if isinstance(size, list | tuple) and len(set(size)) == 1:
            size = size[0]
        if isinstance(size, int):
            return size
    raise Underivable("no configuration of its tower has spatial_merge_size")


def _patch(towers: Sequence[nn.Module]) -> tuple[int, ...]:
    """The shape of one patch: in two dimensions as the layer takes it, else flat."""
    first = _first(towers)
    if isinstance(first, nn.Conv2d):
        return (first.in_channels, *first.kernel_size)
    if isinstance(first, _CONVOLUTIONS):
        return (first.in_channels * prod(first.kernel_size),)
    width = getattr(first, "in_features", None)
    if isinstance(width, int):
        return (width,)
    raise Underivable("its tower has neither a convolution nor a linear layer")


def _image(towers: Sequence[nn.Module]) -> tuple[int, ...]:
    first = _first(towers)
    if not isinstance(first, nn.Conv2d):
        raise Underivable("its tower does not begin with a convolution in two dimensions")
    size = _told(towers, "image_size")
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise Underivable("no configuration of its tower has image_size")
    return (first.in_channels, *size)


def _spectrum(towers: Sequence[nn.Module]) -> tuple[int, int]:
    """Bins and frames: one chunk, or as many frames as the tower has positions for."""
    bins = _told(towers, "num_mel_bins")
    if not isinstance(bins, int):
        raise Underivable("no configuration of its tower has num_mel_bins")
    if isinstance(window := _told(towers, "n_window"), int):
        return bins, 2 * window
    if isinstance(positions := _told(towers, "max_source_positions"), int):
        return bins, _AUDIO_STRIDE * positions
    raise Underivable("no configuration of its tower has n_window or max_source_positions")


def _first(towers: Sequence[nn.Module]) -> nn.Module | None:
    """The first convolution of the tower, or if it has none the first linear layer."""
    found = [each for tower in towers for each in tower.modules()]
    convolutions = (each for each in found if isinstance(each, _CONVOLUTIONS))
    return next(convolutions, next((each for each in found if hasattr(each, "in_features")), None))


def _told(towers: Sequence[nn.Module], name: str) -> Any:
    """What a tower or its configuration says; None if none says anything."""
    for tower in towers:
        for holder in (tower, getattr(tower, "config", None)):
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if value is not None:
                return value
    return None
