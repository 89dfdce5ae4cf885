"""The smallest inputs that a tower of images, videos or sounds takes, for batches that have none.

Sizes are read from the tower's first layers and from configurations; no value is read from the device. The
host knows the values of grids and masks, so the tower's call makes nobody wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from veomni_hook.multimodal import host

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Underivable", "placeholders"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MERGES = ("spatial_merge_size", "merge_kernel_size")
#: The stride of the convolutions in front of an audio tower whose positions are learned.
_AUDIO_STRIDE = 2
#: Frames for a sound tower that takes any number: more than any subsampling needs for one position.
_FRAMES = 64

#: The largest product of strides that is taken for what a tower of convolutions makes one vector of.
_LARGEST = 128


class Underivable(Exception):
    """The configuration does not say how large the smallest input is; the text says what is missing."""


def placeholders(
    names: Sequence[str],
    towers: Iterable[nn.Module],
    *,
    dtype: torch.dtype,
    device: torch.device,
    config: object = None,
    layout: str = "",
) -> list[torch.Tensor | None]:
    """Return one value for each argument.

    Args:
        names: the arguments, as upstream calls them: pixels and a grid, positions or sizes, pixels alone, or
            audio features and what says their lengths.
        towers: the modules that use them, the tower first.
        dtype: the dtype of pixels and features.
        device: of all values.
        config: of the model that calls the towers.
        layout: ``groups``: images, or frames, come in groups; ``flat``: patches are vectors, whatever the
            first layer is.

    Returns:
        Zeros for pixels ``[patches, width]``, ``[1, patches, width]`` or ``[1, channels, size, size]``, and
        for features ``[1, bins, frames]`` or ``[1, frames, bins]``; ones for groups of images ``[1, images,
        channels, size, size]``, because some models leave out images of zeros. int64 for what describes them:
        the grid ``[1, 3]`` (1, 2m, 2m), where m is the size of a merged square, positions ``[1, n, 2]``,
        sizes ``[1, 2]``, numbers ``[1]``, and masks ``[1, frames]`` or ``[1, patches]``. Frames in groups,
        and their positions, have one more dimension in front. None for what follows from others.

    Raises:
        Underivable: the towers do not say the sizes.
    """
    tower = _Tower(list(towers), config, dtype, device)
    pixels, grouped = names[0], layout == "groups"
    arguments: dict[str, torch.Tensor | None]
    if any(name.endswith("grid_thw") for name in names):
        arguments = _by_grid(tower, names, flat=layout == "flat")
    elif any(name.endswith("position_ids") for name in names):
        arguments = _with_positions(tower, names, grouped=grouped)
    elif "spatial_shapes" in names:
        arguments = _by_shape(tower, names)
    elif pixels == "input_features":
        features = tower.zeros(*_spectrum(tower))
        frames = features.shape[-1] if _bins_first(tower) else features.shape[1]
        mask = tower.numbers([[1] * frames])
        arguments = {name: mask if name.endswith("mask") else None for name in names}
        arguments[pixels] = features
    elif "image_sizes" in names:
        arguments = dict(zip(names, _with_size(tower, grouped=grouped), strict=True))
    else:
        image = _image(tower)
        arguments = {pixels: tower.zeros(1, 1, *image) + 1 if grouped else tower.zeros(1, *image)}
    return [arguments[name] for name in names]


@dataclass(frozen=True, slots=True)
class _Tower:
    """The modules that use the values, the tower first, and what values are made with."""

    modules: Sequence[nn.Module]
    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=self.dtype, device=self.device)

    def numbers(self, values: object) -> torch.Tensor:
        return host.made(values, dtype=torch.int64, device=self.device)

    def layers(self, part: str = "") -> list[nn.Module]:
        """Convolutions and linear layers, in the order of the modules, with ``part`` in the name."""
        candidates = [named_module for tower in self.modules for named_module in tower.named_modules()]
        return [
            module
            for name, module in candidates
            if part in name and (isinstance(module, _CONVOLUTIONS) or _width(module))
        ]

    def first(self) -> nn.Module | None:
        """The layer that takes patches, or the first one."""
        return next(iter(self.layers("patch_") or self.layers()), None)

    def told(self, name: str) -> Any:
        """What a tower, its configuration or that of the model says; None if none says anything."""
        holders = [candidate for one in self.modules for candidate in (one, getattr(one, "config", None))]
        for holder in (*holders, self.config):
            value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
            if value is not None:
                return value
        return None

    def size(self, *names: str) -> int | None:
        """The first of several numbers that is told; of a square both sides."""
        for name in names:
            value = self.told(name)
            if isinstance(value, list | tuple) and len(set(value)) == 1:
                value = value[0]
            if isinstance(value, int) and value > 0:
                return value
        return None


def _by_grid(tower: _Tower, names: Sequence[str], *, flat: bool) -> dict[str, torch.Tensor | None]:
    own = any(name.endswith("merge_sizes") for name in names)  # an argument says what is merged: nothing
    merge = 1 if own else tower.size(*_MERGES)
    if merge is None:
        raise Underivable("no configuration of its tower has spatial_merge_size")
    side = 2 * merge
    frames = (tower.size("temporal_merge_size") or 1) if any("video" in name for name in names) else 1
    patch = (prod(_patch(tower)),) if flat else _patch(tower)
    arguments: dict[str, torch.Tensor | None] = {names[0]: tower.zeros(frames * side**2, *patch)}
    for name in names[1:]:
        grid = name.endswith("grid_thw")
        arguments[name] = tower.numbers([[frames, side, side]]) if grid else tower.numbers([merge])
    return arguments


def _with_positions(tower: _Tower, names: Sequence[str], *, grouped: bool) -> dict[str, torch.Tensor | None]:
    """Patches of one square that is pooled to one vector."""
    side, groups = tower.size("pooling_kernel_size") or 1, (1, 1) if grouped else (1,)
    places = tower.numbers([[x, y] for y in range(side) for x in range(side)]).reshape(*groups, -1, 2)
    arguments: dict[str, torch.Tensor | None] = {names[0]: tower.zeros(*groups, side**2, *_patch(tower))}
    for name in names[1:]:
        arguments[name] = places if name.endswith("position_ids") else tower.numbers([1])
    return arguments


def _by_shape(tower: _Tower, names: Sequence[str]) -> dict[str, torch.Tensor | None]:
    side = 2 * (tower.size("downsample_factor", *_MERGES) or 1)
    patches = tower.zeros(1, side**2, *_patch(tower))
    told = {names[0]: patches, "spatial_shapes": tower.numbers([[side, side]])}
    return {name: told.get(name, tower.numbers([[1] * side**2])) for name in names}


def _with_size(tower: _Tower, *, grouped: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An image, and its height and width if anything needs them."""
    pinpoints = tower.told("image_grid_pinpoints")
    if pinpoints:
        channels, *size = _image(tower)
        height, width = min(pinpoints, key=prod)
        tiles = 1 + ceil(height / size[0]) * ceil(width / size[1])
        return tower.zeros(1, tiles, channels, *size), tower.numbers([[height, width]])
    modules = [module for one in tower.modules for module in one.modules()]
    methods = [getattr(module, name, None) for module in modules for name in ("forward", "encode")]
    if any("image_sizes" in inspect.signature(method).parameters for method in methods if method is not None):
        patch = tower.size("vision_spatial_factor", "patch_size")
        if patch is None:
            raise Underivable("no configuration of its tower has patch_size")
        side = 2 * patch * (tower.size(*_MERGES) or 1)
        return tower.zeros(1, _channels(tower), side, side), tower.numbers([[side, side]])
    image = _image(tower)
    return tower.zeros(1, 1, *image) + 1 if grouped else tower.zeros(1, *image), None


def _patch(tower: _Tower) -> tuple[int, ...]:
    """The shape of one patch: in two dimensions as the layer takes it, else flat."""
    first = tower.first()
    if isinstance(first, nn.Conv2d):
        return (first.in_channels, *first.kernel_size)
    if isinstance(first, _CONVOLUTIONS):
        return (first.in_channels * prod(first.kernel_size),)
    if first is not None:
        return (_width(first),)
    raise Underivable("its tower has neither a convolution nor a linear layer")


def _image(tower: _Tower) -> tuple[int, ...]:
    first = tower.modules[0] if tower.modules else None
    if first is not None and _width(first):
        return (_width(first),)  # patches go into a linear layer
    size = tower.told("image_size")
    if not size:  # it has no learned number of positions: twice what convolutions make one vector of
        convolutions = [module for module in tower.modules[0].modules() if isinstance(module, nn.Conv2d)]
        stride = prod(convolution.stride[0] for convolution in convolutions)
        size = 2 * stride if 1 < stride <= _LARGEST else None
    if isinstance(size, int):
        size = (size, size)
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise Underivable("no configuration of its tower has image_size")
    return (_channels(tower), *size)


def _channels(tower: _Tower) -> int:
    first = tower.first()
    if isinstance(first, nn.Conv2d):
        return first.in_channels
    channels = tower.size("num_channels")
    if channels is None:
        raise Underivable("its tower does not begin with a convolution in two dimensions")
    return channels


def _bins_first(tower: _Tower) -> bool:
    """Whether bins are in front of frames: the first layer convolves along frames, or frames have chunks."""
    return isinstance(tower.first(), nn.Conv1d) or tower.size("n_window") is not None


def _spectrum(tower: _Tower) -> tuple[int, ...]:
    """The shape of features: one chunk, as many frames as there are positions for, or any number of them."""
    first = tower.first()
    if _bins_first(tower):
        bins = tower.size("num_mel_bins") or (first.in_channels if isinstance(first, nn.Conv1d) else None)
        if bins is None:
            raise Underivable("no configuration of its tower has num_mel_bins")
        if window := tower.size("n_window"):
            return 1, bins, 2 * window
        positions = tower.size("max_source_positions")
        return 1, bins, _AUDIO_STRIDE * positions if positions else _FRAMES
    if isinstance(first, nn.Conv2d) and first.in_channels == 1:
        return 1, _FRAMES, _subsampled_bins(tower)
    if first is not None and _width(first):
        return 1, _FRAMES, _stacked_bins(tower, _width(first))
    raise Underivable("its tower begins with neither a convolution nor a linear layer")


def _stacked_bins(tower: _Tower, width: int) -> int:
    """Bins in front of a linear layer that takes several frames at once, or its width."""
    together = tower.size("subsampling_factor") or 1
    told = {
        getattr(getattr(module, "config", None), "num_mel_bins", None)
        for one in tower.modules
        for module in one.modules()
    }
    return next((bins for bins in told if isinstance(bins, int) and bins * together == width), width)


def _subsampled_bins(tower: _Tower) -> int:
    """Bins in front of convolutions over frames and bins, from the linear layer behind them."""
    if bins := tower.size("num_mel_bins", "input_feat_size"):
        return bins
    channels, stride = 1, 1
    for layer in tower.layers():
        if not isinstance(layer, nn.Conv2d):
            return _width(layer) // channels * stride
        channels, stride = layer.out_channels, stride * layer.stride[-1]
    raise Underivable("no configuration of its tower has num_mel_bins")


def _width(layer: nn.Module) -> int:
    """The width that a linear layer takes; 0 for other modules."""
    width = getattr(layer, "in_features", None)
    return width if isinstance(width, int) else 0
