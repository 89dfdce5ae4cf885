"""Why upstream's code computes a loss although a kernel could, and what to do about such a reason."""

from __future__ import annotations

__all__ = ["EVALUATION", "NO_GRADIENTS", "READ", "READ_IN_EVALUATION", "SWITCHED_OFF", "UNROUTED", "remedy"]

EVALUATION = "the model is in eval mode, where callers read the logits"
NO_GRADIENTS = "gradients are disabled"
READ = "outputs.logits was read in a training step, so the forward computes the logits"
READ_IN_EVALUATION = "outputs.logits was read in evaluation, so the forward computes the logits there"

#: What to do where no model has asked for a kernel.
UNROUTED = (
    "pass `labels`; the model's loss must be routed (`veomni-hook list FAMILY`): veomni_hook has to be "
    "active when the model's module is imported"
)

_UNREAD = "do not read outputs.logits of this model, or pass token_outputs=True, for which this is no matter"
#: Said once for a model, with its class and the line that reads.
SWITCHED_OFF = (
    "%s: the fused loss is switched off from the next step on, because outputs.logits is read at %s; "
    f"{_UNREAD}"
)
_REMEDIES = {
    EVALUATION: "pass evaluation=True to loss_options",
    NO_GRADIENTS: "pass evaluation=True to loss_options",
    READ: _UNREAD,
    READ_IN_EVALUATION: _UNREAD,
}


def remedy(reason: str) -> str:
    """Return what a user of `loss_options` can do about ``reason``."""
    return _REMEDIES.get(reason, "remove the cause, or do not use loss_options")
