"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from veomni_hook.errors import InputError

__all__ = ["GIBIBYTE", "bytes_of", "readable"]

GIBIBYTE = 1 << 30
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIBIBYTE, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def bytes_of(text: str | int) -> int:
    """Return the bytes that ``80GiB``, ``512 MB`` or a number say. Raises InputError for others."""
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].upper() not in _UNITS:
        raise InputError(
            f"{text!r} is no size of memory", where="a size", fix="write a number and a unit, as in 80GiB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def readable(size: int) -> str:
    """Return a size for people."""
    return f"{size / GIBIBYTE:.2f} GiB" if size >= GIBIBYTE else f"{size / (1 << 20):.2f} MiB"
