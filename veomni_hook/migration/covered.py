"""Whether this package serves everything that a patch is for, so that the patch is unnecessary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from veomni_hook.migration import vocabulary as words
from veomni_hook.migration.concerns import Concern, concerns
from veomni_hook.migration.usage import given, replacement, used
from veomni_hook.patches.spec import Patch, PatchConfig

__all__ = ["Coverage", "coverage"]

#: The ops that idioms route in place of one of VeOmni's ops; for an op that is not here there is none.
OPS: Mapping[str, str] = {
    "rms_norm": "rms_norm",
    "swiglu_mlp": "gated_mlp",
    "rotary_pos_emb": "rotary",
    "rotary_pos_emb_vision": "rotary",
    "moe_experts": "moe_experts",
    "load_balancing_loss": "load_balancing_loss",
    "cross_entropy_loss": "linear_cross_entropy",
}
#: Concerns that a routed op serves; the one of each op of a slot is checked too.
ROUTED: Mapping[str, tuple[str, ...]] = {
    words.KERNEL: (),
    words.LOSS: ("linear_cross_entropy",),
    words.LOAD_BALANCING: ("load_balancing_loss", "moe_router"),
}


@dataclass(frozen=True)
class Coverage:
    """What a patch is for, and what of it is served here.

    Attributes:
        concerns: everything that it is for.
        by: the ops (``op/variant``) that serve the concerns that are served.
        left: the concerns that nothing serves here yet.
        without: ops of VeOmni that the patch asks, and that no idiom routes inside its target.
    """

    concerns: tuple[Concern, ...]
    by: tuple[str, ...]
    left: tuple[Concern, ...]
    without: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether the patch is unnecessary."""
        return not self.left


def coverage(patch: Patch, config: PatchConfig, ops: tuple[str, ...], upstream: str | None) -> Coverage:
    """Return what a patch is for, and what of it is served.

    Args:
        patch: the patch.
        config: its config.
        ops: what idioms route inside its target, as ``op/variant``.
        upstream: the module's text in the release that the patch was written for, if it is known.

    Raises:
        ReplacementError: the source of the replacement, or of a helper, cannot be read.
        SyntaxError: ``upstream``, or a block of the config, is not valid Python.
    """
    found = concerns(patch, config, upstream)
    slots = used(replacement(patch, config), given(config)).slots.values()
    routed = {one.partition("/")[0] for one in ops}
    asked = [op for op, variant in slots if variant]
    without = tuple(dict.fromkeys(op for op in asked if OPS.get(op, op) not in routed))
    left = tuple(one for one in found if not _serves(one, routed, without))
    served = {OPS.get(op, op) for op in asked} or routed
    by = tuple(one for one in ops if one.partition("/")[0] in served) if len(left) < len(found) else ()
    return Coverage(found, by, left, without)


def _serves(concern: Concern, routed: set[str], without: tuple[str, ...]) -> bool:
    if concern.name == words.NO_CHANGE:
        return True  # upstream's own code does it
    if concern.name not in ROUTED:
        return False
    wanted = ROUTED[concern.name]
    if wanted:
        return bool(routed & set(wanted))
    return bool(routed) and not any(op not in ("cross_entropy_loss", "load_balancing_loss") for op in without)
