"""Notes of `explain` on the setting ``precision``: what multiplies in float8, and why not the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from veomni_hook.kernels.float8.setting import in_force
from veomni_hook.layout import counted
from veomni_hook.settings import FORMATS

if TYPE_CHECKING:
    from torch import nn

    from veomni_hook.kernels.float8.layers import Place

__all__ = ["notes_on_precision"]


def notes_on_precision(model: nn.Module) -> Iterator[str]:
    """Yield a line on the layers in float8, and one for each reason of others; none if none is in float8."""
    from veomni_hook.kernels.float8.layers import format_of, places
    from veomni_hook.kernels.moe_experts.float8 import ROWS
    from veomni_hook.kernels.selection.process_choice import STATE

    computed: dict[tuple[str, bool], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    others: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    chosen = in_force().format
    for place in places(model):
        name = place.name.rpartition(".")[2]
        changed = format_of(place.module)
        chosen = chosen or changed
        if not changed:
            reason = place.reason or "the model was made, or adopted, before the setting was in force"
        elif not STATE.active:
            reason = "the hook is not active"
        else:
            reason = _plain_because(place)
        (others[reason] if reason else computed[changed, place.slot is not None])[name] += 1
    if not chosen:
        return
    if not computed:
        yield f"precision: nothing multiplies in {chosen}"
    for (form, experts), names in sorted(computed.items()):
        if experts:
            yield f"precision: in {form}: {_names(names)}, on a GPU from {ROWS:,} rows of an expert on"
        else:
            yield f"precision: in {form}: {counted(sum(names.values()), 'linear layer')}: {_names(names)}"
    for reason, names in others.items():
        yield f"precision: not in {chosen}: {_names(names)}: {reason}"


def _plain_because(place: Place) -> str:
    """Return why the last call of a place in float8 was not computed so; empty: it was, or none was."""
    if place.slot is None:
        reason: str = vars(place.module).get("plain_because", "")
        return reason
    outcome = place.slot.outcome(place.module)
    return "" if outcome is None or outcome.backend in FORMATS else f"{outcome.backend}: {outcome.reason}"


def _names(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())
