"""Mappings of classes that a config has taken back; patched modules that are loaded ask here."""

from __future__ import annotations

__all__ = ["UNMAPPED"]

#: The config's name and the declared target. Sets change atomically; no lock is needed.
UNMAPPED: set[tuple[str, str]] = set()
