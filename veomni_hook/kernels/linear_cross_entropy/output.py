"""A model output whose ``logits`` are computed when first read.

Reading means whatever could see them: attribute, key, index, iteration over values, ``vars``, comparison,
copying, pickling, printing, a pytree. After that, an output is an instance of its plain class. Code that
only looks for tensors in outputs, moves or casts them (FSDP, DDP, accelerate) gets the deferred logits, or an
empty tensor in their place. If logits are read in a training step, the model computes them with the upstream
code from the next step on. If the head is sharded, reading gathers its weights: either all ranks read, or
none.
"""

from __future__ import annotations

import logging
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
from veomni_hook.kernels.linear_cross_entropy.remedies import READ, READ_IN_EVALUATION, SWITCHED_OFF
from veomni_hook.kernels.linear_cross_entropy.transform import Transform

__all__ = [
    "DeferredLogits",
    "LazyLogits",
    "lazy_class",
    "logits_are_read",
    "note_refusal",
    "with_deferred_logits",
]

logger = logging.getLogger("veomni_hook.kernels")

FIELD = "logits"
# Where logits are stored. Under their own name, dynamo (torch 2.11) would bypass the property.
HELD = "_logits"
# These modules walk through outputs each step to find, cast or move tensors; they do not use values.
WALKERS = (
    "torch.distributed.",
    "torch.nn.parallel.",
    "torch.nn.modules.module",
    "torch.utils.module_tracker",
    "deepspeed.",
)
# As do these functions, in which others of the module walk for them.
MOVING = ("accelerate.utils.operations", ("convert_to_fp32", "find_device", "send_to_device"))
# Walkers may use these to walk.
TREES = ("torch.utils._pytree", "torch.utils._cxx_pytree", "optree")

#: Packages through whose functions a read comes.
_BETWEEN = ("veomni_hook", "torch", "collections", "copy", "dataclasses", "pickle")

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


def _reader(frame: FrameType | None) -> str:
    """Return the file and the line of the code that reads, which is neither this package's nor torch's."""
    while frame is not None and _root(frame) in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _root(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


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
        self._moved: torch.device | None = None
        # Inference-mode tensors have no version counter.
        self._version = None if hidden_states.is_inference() else self._hidden_states._version

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits; accelerate reads it before it casts outputs."""
        return self._cast or self._transform.dtype or self._autocast or self._hidden_states.dtype

    @property
    def device(self) -> torch.device:
        """The device of the logits; models move labels there."""
        return self._moved or self._hidden_states.device

    def float(self) -> DeferredLogits:
        """Return deferred logits that will be cast to float32, as accelerate does with outputs."""
        return self.to(dtype=torch.float32)

    def to(self, device: Any = None, dtype: torch.dtype | None = None, **_: Any) -> DeferredLogits:
        """Return deferred logits that will be moved to ``device`` and cast to ``dtype``."""
        other = object.__new__(type(self))
        moved = self._moved if device is None else torch.device(device)
        other.__dict__.update(self.__dict__, _moved=moved, _cast=self._cast if dtype is None else dtype)
        return other

    def stand_in(self) -> torch.Tensor:
        """Return an empty tensor with their dtype and device, for code that casts and moves tensors."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def compute(self) -> torch.Tensor:
        """Return the logits; from the next step on, the model computes them in its forward."""
        model = self._model()
        if model is not None:
            if self._training and logits_are_read(model) is None and not torch.compiler.is_compiling():
                logger.warning(SWITCHED_OFF, type(model).__name__, _reader(sys._getframe(1)))
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
                stacklevel=6,
            )
        return logits.to(self._moved or logits.device, self._cast or logits.dtype)


class LazyLogits(ModelOutput):  # type: ignore[misc]
    """Mixin for output classes that computes ``logits`` on first read; see `with_deferred_logits`.

    ``_plain`` is the class that an instance has from then on; None: it keeps its own, because it has fields
    that no plain class has, or compiled code made it.
    """

    _plain: type | None = None

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
        of_self = _dict_of(self)
        for name in names:
            of_self[HELD if name == FIELD else name] = held[name]
            if held[name] is not None:
                OrderedDict.__setitem__(self, name, held[name])
        if not torch.compiler.is_compiling() and not isinstance(held.get(FIELD), DeferredLogits):
            _settle(self)

    @property
    def logits(self) -> torch.Tensor | None:
        """Scores ``[..., vocab]``; computed when first read."""
        of_self = _dict_of(self._read())
        return of_self[FIELD] if FIELD in of_self else of_self.get(HELD)

    @logits.setter
    def logits(self, value: torch.Tensor | None) -> None:
        _dict_of(self)[HELD] = value

    @logits.deleter
    def logits(self) -> None:
        of_self = _dict_of(self)
        if FIELD not in of_self and HELD not in of_self:
            raise AttributeError(FIELD)
        of_self.pop(FIELD, None)
        of_self.pop(HELD, None)

    def _read(self) -> LazyLogits:
        """Compute deferred logits, unless the caller's caller only looks for tensors."""
        if torch.compiler.is_compiling():  # compiled code contains no walkers
            deferred = self.__dict__.get(HELD)
            if isinstance(deferred, DeferredLogits):
                logits = deferred.compute()
                self.__dict__[HELD] = logits
                OrderedDict.__setitem__(self, FIELD, logits)
        elif not _only_walks(sys._getframe(2)):
            _compute(self)
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

    def popitem(self, last: bool = True) -> tuple[str, Any]:  # noqa: FBT001, FBT002 - as OrderedDict has it
        """Remove the last (or first) name and return it with its value."""
        return OrderedDict.popitem(self._read(), last)

    def copy(self) -> Any:
        """Return a shallow copy."""
        return OrderedDict.copy(self._read())

    def __or__(self, other: Any) -> Any:
        return OrderedDict.__or__(self._read(), other)

    def __ror__(self, other: Any) -> Any:
        return OrderedDict.__ror__(self._read(), other)

    def __eq__(self, other: object) -> Any:
        equal = super().__eq__
        for output in (self, other):
            if isinstance(output, LazyLogits):
                output._read()
        return equal(other)

    def __ne__(self, other: object) -> Any:
        for output in (self, other):
            if isinstance(output, LazyLogits):
                output._read()
        return OrderedDict.__ne__(self, other)

    __hash__ = None  # type: ignore[assignment]

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values that are not None."""
        return tuple(self.values())

    def __reduce__(self) -> tuple[Any, ...]:
        reduced = super().__reduce__
        self._read()
        if not isinstance(self, LazyLogits):
            return reduced()
        (plain,) = (base for base in type(self).__bases__ if base is not LazyLogits)
        values = tuple(getattr(self, field.name) for field in fields(self))
        if more := tuple(field.name for field in fields(self)[len(fields(plain)) :]):
            return _rebuilt, (plain, more, values)
        # Pickle as an ordinary output, which loads without this package.
        return plain, values


@property  # type: ignore[misc]
def _dict(output: LazyLogits) -> dict[str, Any]:
    """Return the ``__dict__`` of an output, as ``vars`` does, which may see the logits."""
    return _dict_of(output._read())


_own_dict = OrderedDict.__dict__["__dict__"].__get__


def _dict_of(output: LazyLogits) -> dict[str, Any]:
    """Return the ``__dict__`` of an output without a read."""
    held: dict[str, Any] = output.__dict__ if torch.compiler.is_compiling() else _own_dict(output)
    return held


def _compute(output: LazyLogits) -> None:
    """Replace deferred logits by logits, wherever ``output`` holds them."""
    of_output = _own_dict(output)
    attribute, item = of_output.get(HELD), OrderedDict.get(output, FIELD)
    # The two are the same, unless one of them was assigned or deleted.
    deferred = attribute if isinstance(attribute, DeferredLogits) else item
    if isinstance(deferred, DeferredLogits):
        logits = deferred.compute()
        if attribute is deferred:
            of_output[HELD] = logits
        if item is deferred:
            OrderedDict.__setitem__(output, FIELD, logits)
    _settle(output)


def _settle(output: LazyLogits) -> None:
    """Give an output without deferred logits the form that it has without this package."""
    of_output = _own_dict(output)
    named = {FIELD if name == HELD else name: value for name, value in of_output.items()}
    of_output.clear()
    of_output.update(named)
    if output._plain is not None:
        output.__class__ = output._plain


def _only_walks(frame: FrameType | None) -> bool:
    """Return whether the code that asks, possibly through a library of trees, uses no values."""
    module, functions = MOVING
    moves = False
    while frame is not None:
        home = frame.f_globals.get("__name__", "")
        if home == module:
            moves = moves or frame.f_code.co_name in functions
        elif moves or not home.startswith(TREES):
            return (
                moves
                or home.startswith(WALKERS)
                or (home == "dataclasses" and frame.f_code.co_name in ("replace", "_replace"))
            )
        frame = frame.f_back
    return moves


def _flatten(output: LazyLogits) -> tuple[list[Any], tuple[tuple[str, ...], DeferredLogits | None]]:
    if not torch.compiler.is_compiling() and not _only_walks(sys._getframe(1)):
        _compute(output)
    held: dict[str, Any] = dict(OrderedDict.items(output))
    deferred = held.get(FIELD)
    if not isinstance(deferred, DeferredLogits):
        return list(held.values()), (tuple(held), None)
    held[FIELD] = deferred.stand_in()
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
    held: dict[str, Any] = dict(zip(names, values, strict=True))
    stand_in = held.get(FIELD)
    if deferred is not None and isinstance(stand_in, torch.Tensor) and not stand_in.numel():
        held[FIELD] = deferred.to(stand_in.device, stand_in.dtype)
    return cls(**held)


@cache
def lazy_class(output_class: type, more: tuple[str, ...] = (), *, traced: bool = False) -> type[LazyLogits]:
    """Return the subclass of ``output_class`` whose logits are computed when first read.

    ``more`` are further fields, which are the last. ``traced``: dynamo traces its instances.
    """
    name, bases = output_class.__name__, (LazyLogits, output_class)
    namespace: dict[str, Any] = {} if traced else {"__dict__": _dict}
    if not more:
        namespace.update(__module__=output_class.__module__, __qualname__=output_class.__qualname__)
        return type(name, bases, namespace if traced else {**namespace, "_plain": output_class})
    added = [(each, Any, field(default=None)) for each in more]
    made: type[LazyLogits] = make_dataclass(
        name, added, bases=bases, init=False, eq=False, namespace=namespace
    )
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
