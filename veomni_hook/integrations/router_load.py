"""A callback for transformers' `Trainer` that logs the load of experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed
from transformers import TrainerCallback

from veomni_hook.routing import Load, monitor

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["RouterLoadCallback"]


class RouterLoadCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Counts what `veomni_hook.routing.monitor` counts, from one log of the training loss to the next.

    At every log of the training loss, the counts of all processes are added up, and these values join the log
    (its dictionary, for callbacks behind this one, and ``state.log_history``):

    - ``router/most``: tokens of the busiest expert in multiples of the mean, the mean over layers;
    - ``router/most_of_layers``: the same, of the worst layer;
    - ``router/idle``: how many experts got no token, in all layers together;
    - ``router/entropy``: the mean over layers of the mean entropy of tokens, in nats.

    Args:
        plot: a file for `Load.plot`, written at every such log by the first process; None: none.
        entropy: whether to sum up entropies, as for `monitor`.
        leave: patterns of blocks to leave alone, as for `monitor`.

    Attributes:
        load: the counts since the last log; None before training.

    Raises:
        RoutingError, KernelError: as `monitor`, when training begins.
    """

    def __init__(
        self, *, plot: str | Path | None = None, entropy: bool = True, leave: Collection[str] = ()
    ) -> None:
        self.load: Load | None = None
        self._plot, self._entropy, self._leave = plot, entropy, leave
        self._open: AbstractContextManager[Load] | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: object,
    ) -> None:
        """Begin to count."""
        self._open = monitor(model, entropy=self._entropy, leave=self._leave)
        self.load = self._open.__enter__()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Stop counting."""
        if self._open is not None:
            counting, self._open = self._open, None
            counting.__exit__(None, None, None)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Add the values to a log of the training loss, and count from zero."""
        if logs is None or "loss" not in logs or self.load is None or not self.load.counts:
            return
        if distributed.is_available() and distributed.is_initialized():
            self.load.reduce()
        values = _values(self.load)
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)
        if self._plot is not None and state.is_world_process_zero:
            self.load.plot(self._plot, title=f"Tokens of each expert up to step {state.global_step}")
        self.load.reset()


def _values(load: Load) -> Mapping[str, float]:
    layers = load.summary().values()
    values = {
        "router/most": sum(layer.most for layer in layers) / len(layers),
        "router/most_of_layers": max(layer.most for layer in layers),
        "router/idle": float(sum(layer.idle for layer in layers)),
    }
    entropies = [layer.entropy for layer in layers if layer.entropy is not None]
    if entropies:
        values["router/entropy"] = sum(entropies) / len(entropies)
    return values
