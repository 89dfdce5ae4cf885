"""What towers compute from the sizes of images and videos, computed where data is prepared.

transformers' towers take such results as keyword arguments: ``image_cu_seqlens``, ``video_position_ids``, ...
Which ones a tower takes, and which functions make them with which arguments, is read from the tower's
``forward``, so every family and release has its own; nothing of upstream's is repeated here.
"""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

import torch

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.kernels.shared.origin import definition_of
from veomni_hook.multimodal.batches import carried
from veomni_hook.multimodal.positions import (
    Positions,
    modeling_of,
    position_ids,
    positions_of,
    understanding,
)
from veomni_hook.patches.code.tree import chain
from veomni_hook.patches.idioms.host_metadata.find import precomputed_names

__all__ = ["CollateMetadata", "collate_metadata"]

_said: set[type | str] = set()
#: The argument of Omni models that says whether videos have sounds, and what a batch with sounds has.
_AUDIO, _SOUNDS = "use_audio_in_video", "feature_attention_mask"
#: The module of releases whose towers take metadata; in earlier ones, it is enough that sizes are known.
_TAKING = "transformers.vision_utils"
_MODALITIES = ("image", "video")
_SIZES = "grid_thw"
#: Tensors of a batch whose values the host reads. Linear attention finds samples of a row by positions.
_READ = (
    "attention_mask",
    "feature_attention_mask",
    "position_ids",
    *(f"{modality}_{_SIZES}" for modality in _MODALITIES),
)
#: What it reads, too, if the model computes positions.
_POSITIONED = ("input_ids", "mm_token_type_ids", "second_per_grid_ts", "video_second_per_grid")


@dataclass(frozen=True)
class Step:
    """One call in a tower's ``forward``: ``a, b = function(sizes, 2, mode=...)``.

    Arguments are names of earlier results (`Named`) or values.
    """

    results: tuple[str, ...]
    function: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True)
class Named:
    """An argument that is an earlier result, or the sizes."""

    name: str


def collate_metadata(
    config: object,
    collate: Callable[[object], object] | None = None,
    *,
    positions: bool | None = None,
    use_audio_in_video: bool | None = None,
) -> CollateMetadata:
    """Return a collator that adds positions and metadata of towers to what ``collate`` returns.

    Give it to a data loader or a trainer. A step then reads no value from the device. It can be pickled, if
    ``collate`` can. Where it has nothing to add, a warning says so, once for each class of configurations.

    Args:
        config: the model's configuration; of a model that also speaks, the whole or that of its thinker.
        collate: makes a batch, a dictionary of tensors, of samples; None: samples are such a batch already.
        positions: whether to add ``position_ids``; None: if the model has a method for them alone.
        use_audio_in_video: of Omni models, whether videos have sounds. Their positions depend on it, so it
            must be known here, or be in the batch; an argument of the model's call comes too late. True: it
            is put into the batch. None: a batch of videos and sounds without it is a warning, once.

    Raises:
        MultimodalError: ``positions`` is true, and the model has no such method.
    """
    config = understanding(config)
    computed = None if positions is False else (position_ids if positions else positions_of)(config)
    module, steps = modeling_of(config).__name__, tuple(_steps(config))
    nothing = positions is None and computed is None and not steps
    if nothing and type(config) not in _said and find_spec(_TAKING) is not None:
        _said.add(type(config))
        warnings.warn(
            f"collate_metadata adds neither positions nor metadata of a tower for {type(config).__name__}: no"
            f" model in {module} computes positions alone, and none has a vision tower that takes metadata."
            " Sizes and masks of a batch are still known on the host. Check that this is the model's"
            " configuration; positions=False says that nothing is expected",
            VeomniHookWarning,
            stacklevel=2,
        )
    return CollateMetadata(module, steps, computed, collate, use_audio_in_video)


@dataclass(frozen=True)
class CollateMetadata:
    """What `collate_metadata` returns.

    Attributes:
        module: the modeling module, whose functions the steps call.
        steps: the calls of the tower's forward, in order.
        positions: computes ``position_ids``, or None.
        collate: the collator whose batches it extends, or None.
        use_audio_in_video: whether videos have sounds; None: the batch says it.
    """

    module: str
    steps: tuple[Step, ...]
    positions: Positions | None
    collate: Callable[[Any], Any] | None = field(default=None)
    use_audio_in_video: bool | None = None

    def __call__(self, samples: Any) -> Any:
        """Return the batch with metadata; a batch that has a value already keeps it."""
        batch = samples if self.collate is None else self.collate(samples)
        entries = dict(batch)
        if self.use_audio_in_video:
            entries.setdefault(_AUDIO, True)
        if self.positions is not None and "position_ids" not in entries:
            if self.use_audio_in_video is None:
                _warn_of_audio(entries)
            computed = self.positions(entries)
            if computed is not None:
                entries["position_ids"] = computed
        for modality in _MODALITIES:
            sizes = entries.get(f"{modality}_{_SIZES}")
            # A batch without images may have sizes of none.
            for name, value in self._made(sizes) if sizes is not None and sizes.numel() else ():
                entries.setdefault(f"{modality}_{name}", value)
        for name in _READ if self.positions is not None else (*_READ, *_POSITIONED):
            if isinstance(entries.get(name), torch.Tensor):
                entries[name] = carried(entries[name])
        batch.update(entries)
        return batch

    def _made(self, sizes: torch.Tensor) -> Iterator[tuple[str, Any]]:
        """Yield what the tower computes from ``sizes``, by the name of the keyword argument."""
        functions = import_module(self.module)
        known: dict[str, Any] = {_SIZES: sizes}
        for step in self.steps:
            arguments = [_filled(argument, known) for argument in step.arguments]
            keywords = {name: _filled(keyword, known) for name, keyword in step.keywords.items()}
            results = getattr(functions, step.function)(*arguments, **keywords)
            known.update(zip(step.results, results if len(step.results) > 1 else (results,), strict=True))
        for name, value in known.items():
            if name != _SIZES and value is not None:
                # The host may read boundaries, which are vectors of integers.
                is_read = isinstance(value, torch.Tensor) and value.dim() == 1
                yield name, carried(value) if is_read and not value.is_floating_point() else value


def _warn_of_audio(batch: Mapping[str, object]) -> None:
    """Warn, once, that positions of videos are computed as without sounds, if a batch may mean otherwise."""
    has = {name for name, value in batch.items() if value is not None}
    if {f"video_{_SIZES}", _SOUNDS} <= has and _AUDIO not in has and _AUDIO not in _said:
        _said.add(_AUDIO)
        warnings.warn(
            "a batch has videos and sounds, and does not say whether the sounds are those of the videos:"
            f" positions are computed as for {_AUDIO}=False, whatever the model is called with. Say it by"
            f" collate_metadata(..., {_AUDIO}=...)",
            VeomniHookWarning,
            stacklevel=3,
        )


def _filled(argument: object, known: Mapping[str, object]) -> Any:
    return known[argument.name] if isinstance(argument, Named) else argument


def _steps(config: object) -> Iterator[Step]:
    """Yield the calls in the forward of the vision tower that take precomputed results."""
    sight = getattr(config, "vision_config", None)
    module = modeling_of(config)
    for kind in list(vars(module).values()):
        if not _is_tower(kind, sight):
            continue
        with torch.device("meta"):
            tower = kind._from_config(sight)
        known = {_SIZES}
        calls = (node for node in ast.walk(definition_of(kind.forward)) if isinstance(node, ast.Assign))
        for node in sorted(calls, key=lambda assignment: assignment.lineno):
            step = _step(node, module, tower)
            if step is None:
                continue
            arguments = (*step.arguments, *step.keywords.values())
            needed = {argument.name for argument in arguments if isinstance(argument, Named)}
            # What needs another result, or one that the tower takes under another name, the tower computes.
            if needed <= known:
                known.update(step.results)
                yield step
        return


def _is_tower(kind: object, sight: object) -> bool:
    expected = getattr(kind, "config_class", None)
    forward = getattr(kind, "forward", None)
    return (
        inspect.isclass(kind)
        and sight is not None
        and expected is not None
        and isinstance(sight, expected)
        and hasattr(kind, "_from_config")
        and forward is not None
        and _SIZES in inspect.signature(forward).parameters
    )


def _step(node: ast.Assign, module: object, tower: object) -> Step | None:
    """The step of an assignment ``a, b = function(..., kwargs=kwargs)``; None for other statements."""
    if not isinstance(node.value, ast.Call) or len(node.targets) != 1:
        return None
    call, target = node.value, node.targets[0]
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    takes = values.pop("kwargs", None)
    if not isinstance(call.func, ast.Name) or not isinstance(takes, ast.Name) or takes.id != "kwargs":
        return None
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    results = tuple(target.id for target in targets if isinstance(target, ast.Name))
    taken = precomputed_names(definition_of(getattr(module, call.func.id)))
    if taken and set(taken) != set(results):
        return None
    try:
        arguments = tuple(_argument(argument, tower) for argument in call.args)
        keywords = {str(name): _argument(value, tower) for name, value in values.items()}
    except ValueError:
        return None  # the tower computes it itself
    return Step(results, call.func.id, arguments, keywords)


def _argument(node: ast.expr, tower: object) -> Any:
    """The value of an argument: the name of an earlier result, a literal, or a part of the tower.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(node, ast.Name):
        return Named(node.id)
    if isinstance(node, ast.Attribute):
        *owners, last = chain(node).split(".")
        if owners[:1] == ["self"]:
            return attrgetter(".".join([*owners[1:], last]))(tower)
    return ast.literal_eval(node)
