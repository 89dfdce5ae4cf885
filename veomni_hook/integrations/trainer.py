"""A callback for transformers' `Trainer` that activates the hook.

`Trainer` has no plugin interface: `TrainingArguments` has no field for kernels other than Liger's, and
transformers reads no entry points. It accepts callbacks, and callbacks get the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from transformers import TrainerCallback

from veomni_hook.adoption import Adoption, adopt
from veomni_hook.errors import AdoptionError
from veomni_hook.finders.handle import Handle, activate_late
from veomni_hook.finders.log import say, warn
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

__all__ = ["VeomniCallback"]


class VeomniCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Adopts the model of a `Trainer` when the trainer is created, and prints what was adopted.

    A script only needs ``Trainer(..., callbacks=[VeomniCallback()])``. The callback activates the hook if it
    is not active yet; it stays active. A model that ``model_init`` creates again for training is adopted when
    training begins, after `accelerate` has prepared it: see docs/reach.md.

    Args:
        **settings: as for `veomni_hook.activate`.

    Attributes:
        handle: the activation, if this callback made one; else None.
        report: the result for the last model; None if there is none yet, or if nothing in the model could be
            adopted, which is a warning (an error under ``VEOMNI_STRICT=1``).

    Raises:
        SettingsError: a setting is unknown or invalid.
    """

    def __init__(self, **settings: object) -> None:
        self.handle: Handle | None = None
        self.report: Adoption | None = None
        self._model: ref[PreTrainedModel] | None = None
        if settings or not STATE.handles:
            self.handle = activate_late(**settings)

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel | None = None,
        **kwargs: object,
    ) -> None:
        """Adopt the trainer's model."""
        self._adopt(model, state)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel | None = None,
        **kwargs: object,
    ) -> None:
        """Adopt the model, if it is not the one that the trainer was created with."""
        if self._model is None or self._model() is not model:
            self._adopt(model, state)

    def _adopt(self, model: PreTrainedModel, state: TrainerState) -> None:
        self._model, self.report = ref(model), None
        try:
            self.report = adopt(model)
        except AdoptionError as error:
            if current_settings().strict:
                raise
            warn(f"the model of the trainer is not patched. {error}")
            return
        if state.is_world_process_zero:
            say(repr(self.report))
