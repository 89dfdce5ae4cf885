"""Names and texts that others wrote, made fit for a terminal, a log or a page."""

from __future__ import annotations

import re

__all__ = ["printable"]

# Control characters but tab and newline, which may be commands to a terminal; lone surrogates, which have no
# encoding; what changes the displayed order; and what HTML does not allow.
_UNFIT = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: str) -> str:
    r"""Return ``text`` with the characters that a reader must not get as such written as ``\u001b``."""
    return _UNFIT.sub(lambda unfit: f"\\u{ord(unfit[0]):04x}", text)
