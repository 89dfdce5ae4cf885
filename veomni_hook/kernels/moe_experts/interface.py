"""Registers our kernels in transformers' list of experts implementations, so that users can select them.

``model.set_experts_implementation("veomni")``, or ``experts_implementation="veomni"`` in
``from_pretrained``, selects the first kernel that ``auto`` would use, even where upstream was measured to be
as fast. Calls still reach it through the guard (`veomni_hook.kernels.slot.Slot.reached`); the function in
transformers' list gets only calls that no kernel took. A backend selected by name, including ``eager``, takes
precedence over the list. transformers 5.2 accepts only its own names there.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from veomni_hook.errors import KernelError, VeomniHookWarning
from veomni_hook.kernels.moe_experts.provenance import OURS
from veomni_hook.kernels.selection.choice import AUTO
from veomni_hook.kernels.slot import Slot

__all__ = ["offer", "run_upstream"]

_SLOTS: WeakKeyDictionary[type, Slot] = WeakKeyDictionary()


def offer(slot: Slot, decorated: type) -> None:
    """Let ``slot`` compute a class of experts for users who select our entry in transformers' list."""
    _SLOTS[decorated] = slot
    functions = getattr(sys.modules.get("transformers.integrations.moe"), "ALL_EXPERTS_FUNCTIONS", None)
    if functions is not None:
        functions.register(OURS, run_upstream)


def run_upstream(module: object, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
    """Compute a call that no kernel took with upstream's loop over experts, and warn.

    Raises:
        KernelError: no kernel can take any call of ``module`` on this device.
    """
    kind = type(module)
    owner = next((base for base in kind.__mro__ if base in _SLOTS), None)
    slot = None if owner is None else _SLOTS[owner]
    answers = None if slot is None else slot.answers(module)
    wanted = AUTO if answers is None else answers.wanted
    if wanted == AUTO:
        if slot is None or answers is None or not answers.candidates(hidden_states.device.type):
            raise KernelError(
                f"no kernel supports {kind.__name__} on {hidden_states.device.type}",
                where=f"{kind.__module__}, experts_implementation={OURS!r}",
                fix="model.set_experts_implementation(None) restores transformers' default; "
                "`veomni-hook explain moe_experts` lists the kernels",
            )
        outcome = slot.outcome(module)
        reason = "no reason was recorded" if outcome is None else outcome.reason
        warnings.warn(
            f"{kind.__name__} runs upstream's loop, not experts_implementation={OURS!r}: {reason}",
            VeomniHookWarning,
            stacklevel=2,
        )
    return inspect.unwrap(vars(owner or kind)["forward"])(module, hidden_states, *args, **kwargs)
