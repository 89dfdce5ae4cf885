"""Which kernels ran in a model according to `veomni_hook.explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from veomni_hook.tools.facts import Facts

if TYPE_CHECKING:
    from torch import nn

__all__ = ["kernels_of", "named"]


def kernels_of(model: nn.Module) -> list[Facts]:
    """Return a row for each op, backend and reason: the number of places, and of calls in training.

    ``ran`` is false for places that no training call has reached; calls of compiled code are not counted.
    """
    from veomni_hook.tools.report.explanation import explain  # keeps the observer of a child process light

    rows: dict[tuple[object, ...], Facts] = {}
    for entry in explain(model).rows:
        calls = entry.training or ((entry.backend, entry.reason, 0),)
        ran = bool(entry.training) or (entry.called and not entry.evaluation)
        for backend, reason, times in calls:
            key = (entry.op, entry.variant, backend, reason, ran)
            row = rows.setdefault(
                key,
                {
                    "model": type(model).__name__,
                    "op": entry.op,
                    "variant": entry.variant,
                    "backend": backend,
                    "reason": reason,
                    "ran": ran,
                    "places": 0,
                    "calls": 0,
                },
            )
            row["places"] += 1
            row["calls"] += times
    return list(rows.values())


def named(row: Facts) -> str:
    """Return the backend of a row, and whether it has not run."""
    from veomni_hook.kernels.explain.rows import NOT_CALLED

    called = row["ran"] or row["backend"] == NOT_CALLED
    return str(row["backend"]) if called else f"{row['backend']}, {NOT_CALLED} yet"
