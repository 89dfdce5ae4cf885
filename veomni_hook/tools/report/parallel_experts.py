"""What expert parallelism does in a model, as lines of `veomni_hook.explain`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from veomni_hook.layout import counted
from veomni_hook.parallel import process
from veomni_hook.parallel.expert_plans import experts_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["notes_on_experts"]

_HOW = {
    "veomni": "a token is sent once to each process that has experts for it",
    "all_to_all": "transformers sends a token once for each of its experts",
}


def notes_on_experts(model: nn.Module) -> tuple[str, ...]:
    """Return a line for each class of experts that processes share, or that the setting could not reach.

    Empty if neither the setting has ``ep`` nor the model divided experts.
    """
    asked = process.sizes().ep
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    size = getattr(config, "ep_size", None) or 1
    if size == 1:
        own = "the script gave a distributed_config of its own"
        why = "it was not loaded with from_pretrained" if config is None else own
        return () if asked == 1 else (f"ep={asked}: the experts of this model are whole: {why}",)
    how = _HOW.get(getattr(config, "ep_implementation", "all_to_all"), "transformers dispatches tokens")
    found = Counter((type(module).__name__, module.num_experts) for _, module in experts_of(model))
    return tuple(
        f"ep={size}: each of {size} processes holds {counted(count, 'expert')} of {name}, in "
        f"{counted(places, 'module')}; {how}"
        for (name, count), places in found.items()
    )
