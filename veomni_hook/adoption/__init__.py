"""Patching a model that is already loaded: `veomni_hook.adopt(model)`."""

from __future__ import annotations

from veomni_hook.adoption.rebinding import adopt
from veomni_hook.adoption.report import Adoption, Entry

__all__ = ["Adoption", "Entry", "adopt"]
