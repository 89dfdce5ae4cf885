"""What VeOmni's generated modules give: `python -m tests.veomni.effects.theirs FILE DEVICE FOLDER...` writes it.

It needs VeOmni, and the release that its modules are generated from. By folder: names of parameters, the positions
that a data worker computes for `media`; by class the weights, and by batch the numbers of a step.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.veomni import newer, sides
from tests.veomni.configurations import CLASSES
from tests.veomni.effects.batches import CLASSIFIES, classes, veomnis
from tests.veomni.standins import stand_ins
from tests.veomni.unable import UNABLE


class _Called:
    """A model that is called whole; its part has the gradients."""

    def __init__(self, whole: Any, part: Any) -> None:
        self._whole, self.config = whole, whole.config
        self.zero_grad, self.named_parameters = whole.zero_grad, part.named_parameters

    def __call__(self, **arguments: Any) -> Any:
        return self._whole(**arguments)


def record(folder: str, device: str) -> dict[str, Any]:
    """What the models of one config give."""
    module, record_of = sides.side(folder, device), {}
    for kind, own in zip(classes(folder), CLASSES[folder], strict=True):
        whole = sides.model(module, folder, own)
        part = whole.thinker if own in newer.WHOLE else whole
        steps = dict(veomnis(folder, kind))
        if not kind.endswith(CLASSIFIES):
            steps["log-probs"] = {**steps.get("media", steps["packed"]), **_asked(whole)}
        numbers = {
            name: sides._step(_Called(whole, part), batch, dummy=False) for name, batch in steps.items()
        }
        weights = {name: value.clone() for name, value in part.state_dict().items()}
        record_of[kind] = {"weights": weights, "numbers": numbers}
        if own == CLASSES[folder][0]:
            names = [name for name, _ in whole.named_parameters()]
            media = steps.get("media")
            places = None if media is None else sides.positions(whole, media).reshape(3, 1, -1)
    return {
        "classes": record_of, "parameters": names, "positions": places, "modules": _modules(folder, module),
    }  # fmt: skip


def _modules(folder: str, module: Any) -> dict[str, Any]:
    """The first call of each class of the module in bfloat16 under autocast: its place, arguments and output."""
    (own, *_), (kind, *_) = CLASSES[folder], classes(folder)
    whole = sides.model(module, folder, own).bfloat16()
    part = whole.thinker if own in newer.WHOLE else whole
    calls: dict[str, Any] = {}
    for name, one in part.named_modules():
        if (
            type(one).__module__ == module.__name__
            and name
            and not isinstance(one, transformers.PreTrainedModel)
        ):
            one.register_forward_hook(partial(_note, calls, name), with_kwargs=True)
    steps = veomnis(folder, kind)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole(**steps.get("media", steps["packed"]), use_cache=False)
    return calls


def _note(calls: dict[str, Any], name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    kept = [
        value
        for value in (*args, *kwargs.values())
        if not isinstance(value, Tensor | int | float | str | type(None))
    ]
    if not kept:  # arguments that another release can take
        calls.setdefault(type(module).__name__, (name, args, kwargs, output))


def _asked(whole: Any) -> dict[str, Any]:
    # The balancing loss is added to a loss, and with log-probabilities there is none.
    routed = hasattr(whole.config.get_text_config(), "output_router_logits")
    return {"return_log_probs": True, **({"output_router_logits": False} if routed else {})}


def main() -> None:
    torch.set_num_threads(1)
    file, device, *folders = sys.argv[1:]
    sides.prepare()
    records = {}
    for folder in folders:
        unable = UNABLE.get((folder, device))
        with stand_ins(unable.package if unable else ""):
            records[folder] = record(folder, device)
    torch.save(records, file)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
