"""What commands report: facts by name, as JSON has them."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Facts"]

#: One document, or one row of a table; only what prints a fact knows its type.
Facts: TypeAlias = dict[str, Any]
