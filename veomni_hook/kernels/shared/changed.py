"""Dictionaries with other values in a block: attributes, parameters and buffers of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

__all__ = ["changed"]


@contextmanager
def changed(values: MutableMapping[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
    """Let ``values`` have the ``others`` in the block; afterwards they are as before, in the same order."""
    before = {name: values[name] for name in others if name in values}
    values.update(others)
    try:
        yield
    finally:
        for name in others:
            if name not in before:
                del values[name]
        values.update(before)
