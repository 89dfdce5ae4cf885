"""What rows say about each other: parts of a fused op that ran, and places that the model bypasses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from veomni_hook.kernels.explain.rows import MODES, NOT_CALLED, Row
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.selection.registry import registry

__all__ = ["with_parts", "with_unasked"]


def with_parts(rows: list[Row]) -> Iterator[Row]:
    """Mark places that were not asked because an enclosing fused op computed their part."""
    taken: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.called and any(backend != EAGER for backend in row.backends):
            taken.update(((row.place, part), row) for part in registry.op(row.op).parts)
    for row in rows:
        around = row.place.rpartition(".")[0]
        whole = taken.get((row.place, row.op)) or (taken.get((around, row.op)) if row.place else None)
        yield row if whole is None or row.settled else _as_a_part(row, whole)


def _as_a_part(row: Row, whole: Row) -> Row:
    """Return ``row`` with the calls of ``whole`` for the modes in which it has none."""
    reason = f"part of {whole.op}"
    for mode in MODES:
        taken = tuple(
            answer._replace(reason=reason) for answer in getattr(whole, mode) if answer.backend != EAGER
        )
        if taken and not getattr(row, mode):
            in_training = mode == "training"
            row = replace(row, training=taken) if in_training else replace(row, evaluation=taken)
    if (row.called and row.compiled != "kind") or whole.backend == EAGER:
        return row
    return replace(row, backend=whole.backend, reason=reason, called=True)


def with_unasked(rows: list[Row]) -> Iterator[Row]:
    """Mark places that are not asked although the modules below them are called, and say what that means."""
    for row in rows:
        said = registry.op(row.op).variants[row.variant].unasked
        modes = [] if not said or row.settled else _modes_below(row, rows)
        if not modes or (row.called and "training" not in modes):
            yield row
        elif row.called:
            yield row.noted(f"in training, {said}")
        else:
            yield replace(row, backend=NOT_CALLED, reason=f"in {' and '.join(modes)}, {said}", settled=True)


def _modes_below(row: Row, rows: list[Row]) -> list[str]:
    """Return the modes in which modules below a place are called and the place itself is not."""
    inside = f"{row.place}." if row.place else ""
    below = [inner for inner in rows if inner.place.startswith(inside) and inner.place != row.place]
    modes = [mode for mode in MODES if any(getattr(inner, mode) for inner in below)]
    if not modes and any(inner.called for inner in below):
        modes = ["compiled calls"]
    return [mode for mode in modes if mode == "compiled calls" or not getattr(row, mode)]
