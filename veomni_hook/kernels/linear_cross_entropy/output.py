"""A model output whose ``logits`` are computed when first read.

Reading means: attribute, key, index, iteration over values, comparison, pickling, printing. Code that only
looks for tensors in outputs (FSDP, DDP, accelerate, pytrees) gets the deferred logits as they are. If logits
are read in a training step, the model computes them with the upstream code from the next step on. If the
head is sharded, reading gathers its weights: either all ranks read, or none.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import field, fields, make_dataclass
from functools import cache, partial
from types import FrameType, MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils import _pytree
from transformers.utils import ModelOutput

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.kernels.linear_cross_entropy.head import keeps_weights, logits_of
from veomni_hook.kernels.linear_cross_entropy.linear_call import LinearCall
from veomni_hook.kernels.linear_cross_entropy.remedies import READ, READ_IN_EVALUATION
from veomni_hook.kernels.linear_cross_entropy.transform import Transform

__all__ = [
    "DeferredLogits",
    "LazyLogits",
    "lazy_class",
    "logits_are_read",
    "note_refusal",
    "with_deferred_logits",
]

FIELD = "logits"
# Where logits are stored. Under their own name, dynamo (torch 2.11) would bypass the property.
HELD = "_logits"
# These modules walk through outputs each step to find, cast or move tensors; they do not use values.
WALKERS = (
    "torch.distributed.",
    "torch.nn.parallel.",
    "torch.utils._pytree",
    "accelerate.utils.operations",
    "deepspeed.",
)

#: Why a model computes its logits with the upstream code, in training (True) and in evaluation (False).
_upstream_only: dict[bool, WeakKeyDictionary[Any, str]] = {
    True: WeakKeyDictionary(),
    False: WeakKeyDictionary(),
}


def logits_are_read(model: Any) -> str | None:
    """Return why ``model`` computes its logits with the upstream code from now on, or None."""
    return _upstream_only[bool(model.training)].get(model)


def note_refusal(model: Any, reason: str, *, training: bool) -> None:
    """Make ``model`` use the upstream code from its next call on, in training or in evaluation."""
    _upstream_only[training][model] = reason


class DeferredLogits:
    """Logits that have not been read yet: the call that makes them, and the state of the forward.

    ``linear`` is the module in ``head`` that holds the weights, ``hidden_states`` the input of ``head`` and
    ``call`` that of ``linear``; ``transform`` is applied to the logits.
    """

    def __init__(
        self,
        model: Any,
        head: Any,
        linear: Any,
        hidden_states: torch.Tensor,
        call: LinearCall,
        transform: Transform,
    ) -> None:
        kind = hidden_states.device.type
        self._model = ref(model)
        self._training = bool(model.training)
        self._head = head
        self._linear = linear
        # Weights that hooks have brought may be in memory that they want back.
        self._call = call if keeps_weights(head, linear) else None
        self._weights = call.weights
        self._hidden_states = hidden_states if self._call is None else call.hidden_states
        self._transform = transform
        self._grad = torch.is_grad_enabled()
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._cast: torch.dtype | None = None
        # Inference-mode tensors have no version counter.
        self._version = None if hidden_states.is_inference() else self._hidden_states._version

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits; accelerate reads it before it casts outputs."""
        return self._cast or self._transform.dtype or self._autocast or self._hidden_states.dtype

    @property
    def device(self) -> torch.device:
        """The device of the logits; models move labels there."""
        return self._hidden_states.device

    def float(self) -> DeferredLogits:
        """Return deferred logits that will be cast to float32, as accelerate does with outputs."""
        other = object.__new__(DeferredLogits)
        other.__dict__.update(self.__dict__, _cast=torch.float32)
        return other

    def compute(self) -> torch.Tensor:
        """Return the logits; from the next step on, the model computes them in its forward."""
        model = self._model()
        if model is not None:
            note_refusal(model, READ if self._training else READ_IN_EVALUATION, training=self._training)
        return self._computed()

    def _computed(self) -> torch.Tensor:
        kind = self._hidden_states.device.type
        autocast = torch.autocast(kind, dtype=self._autocast, enabled=self._autocast is not None)
        with torch.inference_mode(mode=False), torch.set_grad_enabled(self._grad), autocast:
            found = None if self._call is None else self._call.result()
            if found is None:
                found = logits_of(self._head, self._linear, self._hidden_states, self._weights)
            logits, changed = self._transform(found[0]), found[1]
        if self._version is not None and self._hidden_states._version != self._version:
            changed = "the hidden states have changed"
        if changed is not None:
            warnings.warn(
                f"outputs.logits is read, and {changed}: these logits may not be those of the forward pass. "
                "Read them before that, at the latest before optimizer.step().",
                VeomniHookWarning,
                stacklevel=5,
            )
        return logits if self._cast is None else logits.to(self._cast)


class LazyLogits(ModelOutput):  # type: ignore[misc]
    """Mixin for output classes that computes ``logits`` on first read; see `with_deferred_logits`."""

    @classmethod
    def __init_subclass__(cls) -> None:
        # Not super(): transformers would register a flattening that reads every value.
        _pytree.register_pytree_node(
            cls,
            _flatten,
            partial(_unflatten, cls),
            serialized_type_name=f"{__name__}.{cls.__name__}",
            flatten_with_keys_fn=_flatten_with_keys,
        )

    def __init__(self, *values: Any, **named: Any) -> None:
        names = [field.name for field in fields(self)]
        held = {**dict.fromkeys(names), **dict(zip(names, values, strict=False)), **named}
        if len(values) > len(names) or len(held) > len(names):
            raise TypeError(f"{type(self).__name__} has only the fields {', '.join(names)}")
        first, *others = names
        alone = held[first] is not None and all(held[name] is None for name in others)
        if alone and not isinstance(held[first], torch.Tensor):
            # accelerate and nn.DataParallel rebuild outputs from a mapping or from pairs.
            held = {**dict.fromkeys(names), **dict(held[first])}
        for name in names:
            self.__dict__[HELD if name == FIELD else name] = held[name]
            if held[name] is not None:
                OrderedDict.__setitem__(self, name, held[name])

    @property
    def logits(self) -> torch.Tensor | None:
        """Scores ``[..., vocab]``; computed when first read."""
        return self._read().__dict__.get(HELD)

    @logits.setter
    def logits(self, value: torch.Tensor | None) -> None:
        self.__dict__[HELD] = value

    def _read(self) -> LazyLogits:
        """Compute deferred logits, unless the caller's caller only looks for tensors."""
        deferred = self.__dict__.get(HELD)
        if isinstance(deferred, DeferredLogits) and (
            # Compiled code contains no walkers.
            torch.compiler.is_compiling() or not _only_walks(sys._getframe(2))
        ):
            logits = deferred.compute()
            self.__dict__[HELD] = logits
            OrderedDict.__setitem__(self, FIELD, logits)
        return self

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            names = list(self)[key]
            return self[names] if isinstance(names, str) else tuple(self[name] for name in names)
        return OrderedDict.__getitem__(self._read() if key == FIELD else self, key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default``."""
        return OrderedDict.get(self._read() if key == FIELD else self, key, default)

    def items(self) -> Any:
        """Return the (name, value) pairs that are not None."""
        return OrderedDict.items(self._read())

    def values(self) -> Any:
        """Return the values that are not None."""
        return OrderedDict.values(self._read())

    def __eq__(self, other: object) -> bool:
        return OrderedDict.__eq__(self._read(), other)

    __hash__ = None  # type: ignore[assignment]

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values that are not None."""
        return tuple(self.values())

    def __reduce__(self) -> tuple[Any, ...]:
        (plain,) = (base for base in type(self).__bases__ if base is not LazyLogits)
        values = tuple(getattr(self, field.name) for field in fields(self))
        if more := tuple(field.name for field in fields(self)[len(fields(plain)) :]):
            return _rebuilt, (plain, more, values)
        # Pickle as an ordinary output, which loads without this package.
        return plain, values


def _only_walks(frame: FrameType) -> bool:
    home = frame.f_globals.get("__name__", "")
    return home.startswith(WALKERS) or (
        home == "dataclasses" and frame.f_code.co_name in ("replace", "_replace")
    )


def _flatten(output: LazyLogits) -> tuple[list[Any], tuple[tuple[str, ...], DeferredLogits | None]]:
    held: dict[str, Any] = dict(OrderedDict.items(output))
    deferred = held.get(FIELD)
    if not isinstance(deferred, DeferredLogits):
        return list(held.values()), (tuple(held), None)
    del held[FIELD]
    return list(held.values()), (tuple(held), deferred)


def _flatten_with_keys(output: LazyLogits) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _flatten(output)
    return [
        (_pytree.MappingKey(name), value) for name, value in zip(context[0], values, strict=True)
    ], context


def _unflatten(
    cls: type[LazyLogits], values: Iterable[Any], context: tuple[tuple[str, ...], DeferredLogits | None]
) -> LazyLogits:
    names, deferred = context
    held: Mapping[str, Any] = dict(zip(names, values, strict=True))
    return cls(**held) if deferred is None else cls(**held, logits=deferred)


@cache
def lazy_class(output_class: type, more: tuple[str, ...] = ()) -> type[LazyLogits]:
    """Return the subclass of ``output_class`` whose logits are computed when first read.

    ``more`` are further fields, which are the last.
    """
    name, bases = output_class.__name__, (LazyLogits, output_class)
    if not more:
        return type(name, bases, {"__module__": output_class.__module__})
    added = [(each, Any, field(default=None)) for each in more]
    made: type[LazyLogits] = make_dataclass(name, added, bases=bases, init=False, eq=False)
    made.__module__ = output_class.__module__
    return made


def with_deferred_logits(made: Any, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return ``made`` as an output whose `DeferredLogits` are computed when first read.

    ``more`` are further fields and their values. An output that is not a ``ModelOutput`` cannot defer logits
    and gets them now.
    """
    if not isinstance(made, ModelOutput):
        made.logits = made.logits.compute()
        for name, value in more.items():
            setattr(made, name, value)
        return made
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    return lazy_class(made.__class__, tuple(more))(**values, **more)


def _rebuilt(output_class: type, more: tuple[str, ...], values: tuple[Any, ...]) -> LazyLogits:
    return lazy_class(output_class, more)(*values)
