"""The same model with as few layers as have every structure: what runs of a layer, one such layer shows.

What counts layers in a config is found by trial, on tensors without data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

__all__ = ["nodes", "shortened"]

Build = Callable[[Any], Any]
#: Of each module and attribute in a layer: what kernels may be compiled for.
Parts = Mapping[tuple[str, str], object]


def shortened(config: Any, build: Build) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Return a config with fewer layers, and the numbers of layers, of each decoder by name: few, all.

    Args:
        config: stays as it is.
        build: makes the model of a config, on the meta device.
    """
    from veomni_hook.kernels.float8.layers import decoders

    fewer, numbers = config, {}
    for name, layers in decoders(build(config)):
        fewer, number = next(_shorter(fewer, name, layers, build), (fewer, len(layers)))
        numbers[name] = number, len(layers)
    return fewer, numbers


def nodes(config: Any) -> list[Any]:
    """Return the config and all configs in it."""
    parts = [getattr(config, key, None) for key in config.sub_configs]
    return [config, *(node for part in parts if part is not None for node in nodes(part))]


def _shorter(config: Any, name: str, layers: Sequence[Any], build: Build) -> Iterator[tuple[Any, int]]:
    """Yield configs whose decoder ``name`` has fewer layers, and all structures of ``layers``."""
    for place, field, lists in _counting(config, len(layers)):
        apart = _apart(layers, vars(nodes(config)[place]), lists)
        same = _same(apart)
        wanted = _structures(apart, same)
        for number in range(len({*wanted}), len(layers)):
            changed = deepcopy(config)
            node = vars(nodes(changed)[place])
            node.update({key: node[key][:number] for key in lists} | ({field: number} if field else {}))
            try:
                fewer: Sequence[Any] = build(changed).get_submodule(name)
            except Exception:  # where it counted something else, there may be no such model
                fewer = ()
            if not fewer:
                continue
            if len(fewer) != number:
                break
            if {*wanted} == {*_structures(_apart(fewer, node, lists), same)}:
                yield changed, number


def _counting(config: Any, count: int) -> Iterator[tuple[int, str | None, list[str]]]:
    """Yield what may count layers: the place of a config, its field if any, its lists of an item a layer."""
    for place, node in enumerate(nodes(config)):
        lists = [key for key, value in vars(node).items() if isinstance(value, list) and len(value) == count]
        fields = [key for key, value in vars(node).items() if type(value) is int and value == count]
        yield from ((place, field, lists) for field in fields)
        if lists:
            yield place, None, lists


def _apart(layers: Sequence[Any], node: Mapping[str, Any], lists: Sequence[str]) -> list[Parts]:
    said = [{("", key): _plain(node[key][number]) for key in lists} for number in range(len(layers))]
    return [dict(_parts(layer)) | items for layer, items in zip(layers, said, strict=True)]


def _structures(layers: Sequence[Parts], same: set[tuple[str, str]]) -> list[object]:
    """Return for each layer what is equal for layers that are alike."""
    return [
        frozenset((key, None if key in same else value) for key, value in parts.items()) for parts in layers
    ]


def _same(layers: Sequence[Parts]) -> set[tuple[str, str]]:
    """Return what is the same in all layers that have it, or counts them, as `layer_idx` does."""
    numbered: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    for number, parts in enumerate(layers):
        for key, value in parts.items():
            numbered.setdefault(key, []).append((number, value))
    return {key for key, values in numbered.items() if _is_line(values)}


def _is_line(values: Sequence[tuple[int, Any]]) -> bool:
    (first, start), *others = values
    if any(type(value) is not int for _, value in values):
        return all(value == start for _, value in others)
    slopes = {(value - start) / (number - first) for number, value in others}
    return len(slopes) <= 1 and slopes <= {0, 1, 2}


def _parts(layer: Any) -> Iterator[tuple[tuple[str, str], object]]:
    for path, module in layer.named_modules():
        yield (path, ""), type(module)
        for name, tensor in (module._parameters | module._buffers).items():
            yield (path, name), None if tensor is None else (tensor.shape, tensor.dtype)
        for name, value in vars(module).items():
            if not name.startswith("_"):
                yield (path, name), _plain(value)


def _plain(value: Any) -> object:
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    # No value of a float: Triton compiles nothing for it, and some layers have one each.
    return getattr(value, "__qualname__", type(value))
