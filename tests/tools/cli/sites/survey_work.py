"""Functions for `test_survey`, in a module that worker processes can import."""

from __future__ import annotations

import os


def joined(module: str, text: str, *, sign: str) -> tuple[str, int]:
    """The module's name and text, and the process that joined them."""
    return f"{module}{sign}{text.strip()}", os.getpid()


def fails_in_m2(module: str, text: str) -> str:
    """Raise for one module."""
    if module == "m2":
        raise ValueError("m2 it was")
    return module


def ends(module: str, text: str) -> None:
    """End the process, as the system does when memory runs out."""
    os._exit(3)
