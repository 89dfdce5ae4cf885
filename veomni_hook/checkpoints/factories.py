"""One factory per layout: ``from_*`` for loaders, ``to_*`` for savers.

``config`` is a transformers config (flat or nested), the content of ``config.json``, or `ExpertSizes`. The
other arguments are those of `ExpertConverter` and `ExpertSaver`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict, Unpack

from torch import Tensor

from veomni_hook.checkpoints.converter import ExpertConverter, Layout
from veomni_hook.checkpoints.names import LINEAR, NUMBERED, Projections
from veomni_hook.checkpoints.saver import ExpertSaver
from veomni_hook.checkpoints.sizes import ExpertSizes
from veomni_hook.errors import CheckpointError

__all__ = [
    "from_any",
    "from_fused",
    "from_fused_transposed",
    "from_per_expert",
    "to_fused",
    "to_fused_transposed",
    "to_per_expert",
]


class LoadOptions(TypedDict, total=False):
    """Arguments that all ``from_*`` factories share."""

    expected: Iterable[str] | None
    into: Mapping[str, Tensor] | None
    under: str
    block: tuple[str, str] | None


class SaveOptions(TypedDict, total=False):
    """Arguments that all ``to_*`` factories share."""

    under: str
    block: tuple[str, str] | None


def from_per_expert(config: object, **options: Unpack[LoadOptions]) -> ExpertConverter:
    """Convert `experts.N.gate_proj/up_proj/down_proj.weight` (or w1/w3/w2); fused tensors pass unchanged."""
    return ExpertConverter(ExpertSizes.of(config), {Layout.PER_EXPERT}, **options)


def from_fused(config: object, **options: Unpack[LoadOptions]) -> ExpertConverter:
    """Check `gate_up_proj [E, 2I, H]` and `down_proj [E, H, I]`, the layout in memory; nothing changes."""
    return ExpertConverter(ExpertSizes.of(config), {Layout.FUSED}, **options)


def from_fused_transposed(
    config: object, *, square: str | None = None, **options: Unpack[LoadOptions]
) -> ExpertConverter:
    """Convert `gate_up_proj [E, H, 2I]` and `down_proj [E, I, H]`; the layout in memory passes unchanged.

    If 2I == H or I == H, the shape is the same in both layouts, and ``square`` must name the layout:
    ``"fused"`` or ``"fused_transposed"``.
    """
    return ExpertConverter(ExpertSizes.of(config), {Layout.TRANSPOSED}, square=_square(square), **options)


def from_any(config: object, *, square: str | None = None, **options: Unpack[LoadOptions]) -> ExpertConverter:
    """Convert any of the three layouts, by name and shape; ``square`` as in `from_fused_transposed`."""
    return ExpertConverter(ExpertSizes.of(config), {*Layout}, square=_square(square), **options)


def to_per_expert(
    config: object,
    *,
    projections: tuple[str, str, str] = (LINEAR.gate, LINEAR.up, LINEAR.down),
    **options: Unpack[SaveOptions],
) -> ExpertSaver:
    """Write `experts.N.<projection>.weight`; ``projections`` gives the names of gate, up and down.

    Raises:
        CheckpointError: no loader in this package would understand the names.
    """
    named = Projections(*projections)
    if named not in (LINEAR, NUMBERED):
        raise CheckpointError(
            f"projections={projections!r} are names that from_per_expert does not read",
            where="to_per_expert",
            fix="known are gate_proj, up_proj, down_proj and w1, w3, w2",
        )
    return ExpertSaver(ExpertSizes.of(config), Layout.PER_EXPERT, projections=named, **options)


def to_fused(config: object, **options: Unpack[SaveOptions]) -> ExpertSaver:
    """Write the layout in memory unchanged, after checks."""
    return ExpertSaver(ExpertSizes.of(config), Layout.FUSED, projections=LINEAR, **options)


def to_fused_transposed(config: object, **options: Unpack[SaveOptions]) -> ExpertSaver:
    """Write `gate_up_proj [E, H, 2I]` and `down_proj [E, I, H]`."""
    return ExpertSaver(ExpertSizes.of(config), Layout.TRANSPOSED, projections=LINEAR, **options)


def _square(layout: str | None) -> Layout | None:
    if layout is None or layout in (Layout.FUSED, Layout.TRANSPOSED):
        return None if layout is None else Layout(layout)
    raise CheckpointError(
        f"square={layout!r} is no fused layout",
        where="square",
        fix=f"one of {Layout.FUSED.value!r} and {Layout.TRANSPOSED.value!r}",
    )
