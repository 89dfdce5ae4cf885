"""What the observer of a front end's processes records beside the losses of `veomni-hook compare`."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from veomni_hook.tools.compare.recorder import Recorder


class Steps(Recorder):
    """A recorder that also keeps the norm of each step's gradients, and what `explain` says after the last step."""

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self.gradients: list[float] = []
        self.explanation = ""

    def note_step(self, optimizer: Any) -> int:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        squares = [gradient.detach().double().square().sum() for gradient in gradients]
        self.gradients.append(float(torch.stack(squares).sum().sqrt()))
        return super().note_step(optimizer)

    def profiled(self) -> bool:
        return True  # there is no further step

    def explained(self) -> None:
        import veomni_hook

        self.explanation = "\n".join(str(veomni_hook.explain(model)) for model in outermost_models())

    def _found(self) -> dict[str, Any]:
        return {**super()._found(), "gradients": self.gradients, "explanation": self.explanation}


def outermost_models() -> list[Any]:
    """Return transformers' models that are part of no other: adapters call theirs in ways that no hook of torch sees."""
    kind = sys.modules["transformers.modeling_utils"].PreTrainedModel
    # Not `isinstance`: asked for their class, some objects import what they stand for.
    models = [known for known in gc.get_objects() if issubclass(type(known), kind)]
    inner = {id(module) for model in models for module in model.modules() if module is not model}
    return [model for model in models if id(model) not in inner]
