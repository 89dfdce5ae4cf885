"""Positions of multimodal models, computed where data is prepared: by upstream's own methods, on the CPU."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from veomni_hook.errors import MultimodalError
from veomni_hook.kernels.shared.origin import definition_of
from veomni_hook.patches.code.template import Found, Template
from veomni_hook.patches.upstream_names import POSITIONS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Positions", "modeling_of", "position_ids", "positions_of", "understanding"]

_CONFIGURATION = "configuration_"
#: Modules of the classes that all configurations derive from, with the name of `_CONFIGURATION` replaced.
_BASES = ("transformers.modeling_", "transformers.utils.", "transformers.integrations.")
_COMPUTE = "compute_3d_position_ids"
#: How a forward pass computes positions, in releases that have no such method for a model.
_IN_FORWARD = Template(
    f"""
if MASK is not None and GIVEN is None:
    ...
    if FIRST:
        ...
        RESULT, DELTAS = self.{POSITIONS}(*ARGUMENTS)
        ...
    else:
        ...
"""
)


def position_ids(config: PretrainedConfig) -> Positions:
    """Return a function of a batch that gives its ``position_ids``; it can be pickled.

    Args:
        config: the model's configuration; of a model that also speaks, the whole or that of its thinker.

    Raises:
        MultimodalError: the model does not compute positions from the sizes of images and videos.
    """
    config = understanding(config)
    positions = positions_of(config)
    if positions is None:
        raise MultimodalError(
            f"no model of {type(config).__name__} has a method {_COMPUTE}, or {POSITIONS} for its forward",
            where=modeling_of(config).__name__,
            fix="leave positions to the model: collate_metadata(config, positions=False)",
        )
    return positions


def positions_of(config: PretrainedConfig) -> Positions | None:
    """Return what `position_ids` returns for the configuration of a part that understands, or None."""
    kind = _computing_in(modeling_of(config), config)
    return None if kind is None else Positions(config, kind)


class Positions:
    """Computes the ``position_ids`` of a batch as the model would.

    The model's methods read nothing but their arguments and the configuration, so this object stands in for
    the model, of the class ``kind``.
    """

    def __init__(self, config: PretrainedConfig, kind: type) -> None:
        self.config = config
        self._kind = kind

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        attribute = getattr(self._kind, name, None)
        # Models copy some numbers of the configuration.
        if attribute is None:
            return getattr(self.config.vision_config, name)
        return attribute.__get__(self) if inspect.isfunction(attribute) else attribute

    def __call__(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the positions ``[3, batch, positions]`` of a batch; None if the model derives them later.

        Args:
            batch: ``input_ids`` ``[batch, positions]`` on the CPU, and what processors add:
                ``attention_mask``, ``image_grid_thw``, ``video_grid_thw``, ``mm_token_type_ids``, seconds and
                lengths. Nothing is mutated.
        """
        sounds = batch.get("feature_attention_mask")
        inputs = {"audio_feature_lengths": None if sounds is None else sounds.sum(-1), **batch}
        computing = _computes(self._kind)
        positions: torch.Tensor | None = None
        call = None if computing.__name__ == _COMPUTE else _computed_in(computing)
        if call is None:
            compute = getattr(self, _COMPUTE)
            self.rope_deltas = None
            positions = compute(**{name: inputs.get(name) for name in inspect.signature(compute).parameters})
            self.rope_deltas = None
        elif inputs.get(call["MASK"]) is not None:
            arguments = (inputs.get(ast.unparse(node)) for node in call.bound["ARGUMENTS"].nodes)
            positions = getattr(self, POSITIONS)(*arguments)[0]
        return positions


def understanding(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the part that understands, if a model also speaks; else ``config``."""
    return getattr(config, "thinker_config", config)


def modeling_of(config: PretrainedConfig) -> ModuleType:
    """Return the module that defines the models of a configuration.

    A class that a user derives from a configuration of transformers has the models of that: the first module
    with a model that computes positions counts, else the first beside a module of configurations.
    """
    modules = list(_modelings(config))
    beside = [module for module, own in modules if not own]
    computing = (module for module, _ in modules if _computing_in(module, config) is not None)
    return next(computing, beside[0] if beside else import_module(type(config).__module__))


def _modelings(config: PretrainedConfig) -> Iterator[tuple[ModuleType, bool]]:
    """Yield the modeling modules of a configuration's classes, and whether each is the class's own module."""
    for kind in type(config).__mro__:
        name = kind.__module__.replace(_CONFIGURATION, "modeling_")
        if name != "builtins" and not name.startswith(_BASES):
            try:
                yield import_module(name), name == kind.__module__
            except ModuleNotFoundError as missing:
                if missing.name != name:
                    raise


def _computing_in(module: ModuleType, config: PretrainedConfig) -> type | None:
    """Return the first class for a configuration that computes positions by a method of its own."""
    for kind in list(vars(module).values()):
        if inspect.isclass(kind) and kind.__module__ == module.__name__:
            # What a class inherits from another module is that module's.
            if getattr(_computes(kind), "__module__", "") == module.__name__:
                expected = getattr(kind, "config_class", None)
                if expected is None or isinstance(config, expected):
                    return kind
    return None


def _computes(kind: Any) -> Any:
    """Return the method of a class that computes positions, alone or in its forward pass, or None."""
    forward = getattr(kind, "forward", None) if hasattr(kind, POSITIONS) else None
    return getattr(kind, _COMPUTE, None) or (forward if forward and _computed_in(forward) else None)


@lru_cache(maxsize=64)
def _computed_in(forward: Any) -> Found | None:
    """Return how a forward pass computes positions itself."""
    matches = (_IN_FORWARD.match(node) for node in ast.walk(definition_of(forward)))
    return next((found for found in matches if found is not None), None)
