"""Models without the parts that make speech; patched code calls this where the setting `speech` is off.

`veomni_hook.patches.idioms.speech` inserts the calls. Nothing is removed from a module: the ``__init__``
of a model gets a configuration that asks for no speech.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from veomni_hook.errors import SpeechError, VeomniHookWarning
from veomni_hook.printable import printable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["kept", "left_out", "refuse", "save_speakers", "taking_what", "text_by_default"]

_FIX = (
    'ask for text (generation_mode="text" or return_audio=False); for speech, set VEOMNI_SPEECH=1 '
    "(the setting `speech`) and load a checkpoint that has these parts"
)

logger = logging.getLogger("veomni_hook")
_said: set[type] = set()


def left_out(
    model: PreTrainedModel, config: PretrainedConfig, field: str, build: Callable[[], object], *parts: str
) -> Any:
    """Return a configuration with which a model builds no parts for speech.

    Args:
        model: the model, which is being built. Two of its lists are changed, for the parts that it will not
            have: of weights that a checkpoint may also hold, and (its children's, too) of classes of layers
            that are never divided.
        config: its configuration, which is not changed.
        field: the field that says whether the parts are built.
        build: the model's method that would build them.
        *parts: the attributes that would hold the parts.

    Returns:
        A shallow copy of ``config`` with ``field`` false; ``config`` itself if it is false already.
    """
    if not getattr(config, field):
        return config
    without = copy.copy(config)
    setattr(without, field, False)
    # post_init turns both lists into sets, and adds what the model's children have.
    model._keys_to_ignore_on_load_unexpected = [
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *(rf"^{name}\." for name in parts),
    ]
    present = {type(module).__name__ for module in model.modules()}
    for child in (model, *model.children()):
        # accelerate refuses to divide a model (FSDP) that lacks one of these classes.
        child._no_split_modules = present.intersection(child._no_split_modules or ())
    _say(type(model), config, build.__name__, parts)
    return without


def taking_what(other: Callable[..., object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a method the signature and the docstring of another.

    Trainer reads the signature: it drops what ``forward`` does not take, and asks whether there are labels.
    """

    def decorate(method: Any) -> Any:
        method.__signature__, method.__doc__ = inspect.signature(other), other.__doc__
        return method

    return decorate


def kept(model: type, reason: str) -> None:
    """Warn, once per class, that the parts of a model for speech are built although the setting is off."""
    if model not in _said:
        _said.add(model)
        warnings.warn(
            f"VEOMNI_SPEECH=0 does not apply to {model.__name__}: {reason}. All its parts are built",
            VeomniHookWarning,
            stacklevel=3,
        )


def text_by_default(model: PreTrainedModel, options: dict[str, object]) -> None:
    """Let a model without the parts for speech generate text, unless ``options`` ask for speech.

    Args:
        model: the model.
        options: the ``**kwargs`` of ``generate``, from which upstream's code takes ``generation_mode``. It is
            changed: ``return_audio``, which other families and releases have, means the same.

    Raises:
        SpeechError: one asks for text and the other for speech.
    """
    if model.has_talker:
        return
    asked = options.pop("return_audio", None)
    if options.get("generation_mode") is None:
        options["generation_mode"] = "audio" if asked else "text"
    elif asked:
        refuse(type(model))


def refuse(model: type) -> None:
    """Raise because speech is asked for and the model has no parts that make it.

    Raises:
        SpeechError: always; it is a ValueError, as upstream's is.
    """
    raise SpeechError(
        "speech was asked for, and the model was built without the parts that make it",
        where=f"{model.__name__}.generate; VEOMNI_SPEECH=0",
        fix=_FIX,
    )


def save_speakers(
    speakers: Mapping[str, object],
    folder: str | os.PathLike[str],
    file: str,
    args: Sequence[object],
    options: Mapping[str, object],
) -> None:
    """Write the file of speakers that ``from_pretrained`` demands; ``save_pretrained`` does not write it.

    Args:
        speakers: what the file holds.
        folder: where the model was saved.
        file: the name of the file.
        args, options: the further arguments of ``save_pretrained``.
    """
    first = args[0] if args else options.get("is_main_process", True)
    if first and os.path.isdir(folder):
        torch.save(dict(speakers), os.path.join(folder, file))


def _say(model: type, config: object, build: str, parts: Sequence[str]) -> None:
    """Log, once per class, which parts are left out, and how much memory that saves."""
    if model in _said or not logger.isEnabledFor(logging.INFO):
        return
    _said.add(model)
    size = _size(model, config, build)
    logger.info(
        "%s is built without speech (VEOMNI_SPEECH=0): %s left out%s",
        printable(model.__name__),
        " and ".join(parts),
        f", {size / 2**20:,.1f} MiB of weights" if size else "",
    )


def _size(model: type, config: object, build: str) -> int:
    """The bytes of the weights that a method of a model builds; 0 if it cannot be tried.

    The parts are built without memory, on the meta device, in a model that has nothing else.
    """
    if is_deepspeed_zero3_enabled():  # its processes would divide the parts, together
        return 0
    without: Any = object.__new__(model)
    nn.Module.__init__(without)
    without.config = config
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            getattr(without, build)()
    except Exception:  # what a message says must not keep a model from being built
        return 0
    return sum(parameter.numel() * parameter.element_size() for parameter in without.parameters())
