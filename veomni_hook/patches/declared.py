"""What a declaration leaves out or may write in several ways: device, description, digests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from veomni_hook.patches.records import PatchType

__all__ = ["collected", "describe", "device_of", "frozen", "is_pattern"]


def device_of(target_file: str) -> Literal["gpu", "npu"] | None:
    """The device that the name of patchgen's output file says, if it says one."""
    if target_file.endswith("_npu.py"):
        return "npu"
    return "gpu" if target_file.endswith("_gpu.py") else None


def is_pattern(source_module: str) -> bool:
    """Whether a source module is a pattern."""
    return any(character in source_module for character in "*?[")


_DESCRIPTIONS = {
    PatchType.CLASS_REPLACEMENT: "Replace {target} with {name}",
    PatchType.FUNCTION_REPLACEMENT: "Replace {target} with {name}",
    PatchType.METHOD_OVERRIDE: "Override {target}",
    PatchType.METHOD_ADDITION: "Add {target}",
    PatchType.INIT_MODIFICATION: "Modify {target}.__init__",
    PatchType.GUARD: "Guard {target}",
}


def describe(patch_type: PatchType, target: str, replacement: object) -> str:
    """The description of a patch that has none."""
    return _DESCRIPTIONS[patch_type].format(
        target=target, name=getattr(replacement, "__name__", "a replacement")
    )


def collected(digests: Collection[str]) -> tuple[str, ...]:
    """Digests as a tuple; a single one may be given as text."""
    return (digests,) if isinstance(digests, str) else tuple(digests)


def frozen(relies_on: Mapping[str, Collection[str]] | None) -> dict[str, tuple[str, ...]]:
    """The digests of each definition as a tuple."""
    return {name: collected(digests) for name, digests in (relies_on or {}).items()}
