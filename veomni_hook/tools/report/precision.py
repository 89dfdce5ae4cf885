"""Notes of `explain` on the setting ``precision``: what multiplies in float8, and why not the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from veomni_hook.kernels.float8.setting import in_force
from veomni_hook.layout import counted
from veomni_hook.settings import FLOAT8

if TYPE_CHECKING:
    from torch import nn

    from veomni_hook.kernels.float8.layers import Place

__all__ = ["notes_on_precision"]


def notes_on_precision(model: nn.Module) -> Iterator[str]:
    """Yield a line on the layers in float8, and one for each reason of others; none if none is in float8."""
    from veomni_hook.kernels.float8.layers import in_float8, places
    from veomni_hook.kernels.float8.linear import Float8Linear
    from veomni_hook.kernels.moe_experts.float8 import ROWS
    from veomni_hook.kernels.selection.process_choice import STATE

    computed: dict[bool, dict[str, int]] = {True: defaultdict(int), False: defaultdict(int)}
    others: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    chosen = in_force().float8
    for place in places(model):
        name = place.name.rpartition(".")[2]
        changed = type(place.module) is Float8Linear or in_float8(place.module)
        chosen = chosen or changed
        if not changed:
            reason = place.reason or "the model was made, or adopted, before the setting was in force"
        elif not STATE.active:
            reason = "the hook is not active"
        else:
            reason = _plain_because(place)
        (others[reason] if reason else computed[place.slot is not None])[name] += 1
    if not chosen:
        return
    if not any(computed.values()):
        yield "precision: nothing multiplies in float8"
    if linear := computed[False]:
        yield f"precision: in float8: {counted(sum(linear.values()), 'linear layer')}: {_names(linear)}"
    if experts := computed[True]:
        yield f"precision: in float8: {_names(experts)}, on a GPU from {ROWS:,} rows of an expert on"
    for reason, names in others.items():
        yield f"precision: not in float8: {_names(names)}: {reason}"


def _plain_because(place: Place) -> str:
    """Return why the last call of a place in float8 was not computed so; empty: it was, or none was."""
    if place.slot is None:
        reason: str = vars(place.module).get("plain_because", "")
        return reason
    outcome = place.slot.outcome(place.module)
    return "" if outcome is None or outcome.backend == FLOAT8 else f"{outcome.backend}: {outcome.reason}"


def _names(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())
