"""Notes of `explain` on the setting ``precision``: which linear layers multiply in float8, why not others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from veomni_hook.kernels.float8.setting import in_force
from veomni_hook.layout import counted

if TYPE_CHECKING:
    from torch import nn

__all__ = ["notes_on_precision"]


def notes_on_precision(model: nn.Module) -> Iterator[str]:
    """Yield a line on the layers in float8, and one for each reason of others; none if none is in float8."""
    from veomni_hook.kernels.float8.layers import places
    from veomni_hook.kernels.float8.linear import Float8Linear
    from veomni_hook.kernels.selection.process_choice import STATE

    computed: dict[str, int] = defaultdict(int)
    others: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    chosen = in_force().float8
    for place in places(model):
        name = place.name.rpartition(".")[2]
        if type(place.module) is Float8Linear:
            chosen = True
            reason = place.module.plain_because if STATE.active else "the hook is not active"
        else:
            reason = place.reason or "the model was made, or adopted, before the setting was in force"
        (others[reason] if reason else computed)[name] += 1
    if not chosen:
        return
    if computed:
        what = "x W^T and the gradient of x in float8, the gradient of W as upstream"
        yield f"precision: {counted(sum(computed.values()), 'linear layer')} ({_names(computed)}): {what}"
    else:
        yield "precision: no linear layer multiplies in float8"
    for reason, names in others.items():
        yield f"precision: not in float8: {_names(names)}: {reason}"


def _names(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())
