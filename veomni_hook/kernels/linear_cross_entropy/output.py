"""A model output whose ``logits`` are computed when they are needed.

An attribute, a key or an index gives `UnreadLogits`, which are computed when their values are used. Iteration
over values, ``vars``, comparison, copying, pickling, printing and a pytree compute them. After that, an
output is an instance of its plain class. Code that only looks for tensors in outputs, moves or casts them
(FSDP, DDP, accelerate) gets the deferred logits, or an empty tensor in their place. If logits are computed in
a training step, the model computes them with the upstream code from the next step on. If the head is sharded,
reading gathers its weights: either all ranks read, or none.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, make_dataclass
from functools import cache, partial, wraps
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree
from transformers.utils import ModelOutput

from veomni_hook.kernels.linear_cross_entropy import requested_call
from veomni_hook.kernels.linear_cross_entropy.deferred import DeferredLogits

__all__ = ["LazyLogits", "lazy_class", "with_deferred_logits"]

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


def _reading(name: str) -> Callable[..., Any]:
    """Return a method of `OrderedDict` as one of outputs: it reads the logits first, of operands, too."""

    @wraps(getattr(OrderedDict, name))
    def reading(*operands: Any, **named: Any) -> Any:
        for operand in operands:
            if isinstance(operand, LazyLogits):
                operand._read()
        # By its name: dynamo cannot trace the method itself.
        return getattr(OrderedDict, name)(*operands, **named)

    return reading


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
        by_name = {**dict.fromkeys(names), **dict(zip(names, values, strict=False)), **named}
        if len(values) > len(names) or len(by_name) > len(names):
            raise TypeError(f"{type(self).__name__} has only the fields {', '.join(names)}")
        first, *others = names
        alone = by_name[first] is not None and all(by_name[name] is None for name in others)
        if alone and not isinstance(by_name[first], torch.Tensor):
            # accelerate and nn.DataParallel rebuild outputs from a mapping or from pairs.
            by_name = {**dict.fromkeys(names), **dict(by_name[first])}
        of_self = _dict_of(self)
        for name in names:
            of_self[HELD if name == FIELD else name] = by_name[name]
            if by_name[name] is not None:
                OrderedDict.__setitem__(self, name, by_name[name])
        if not torch.compiler.is_compiling() and not isinstance(by_name.get(FIELD), DeferredLogits):
            _settle(self)

    @property
    def logits(self) -> torch.Tensor | None:
        """Scores ``[..., vocab]``; computed when they are needed."""
        if (unread := self._unread(_dict_of(self).get(HELD))) is not None:
            return unread
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

    def _unread(self, deferred: object) -> torch.Tensor | None:
        """Return what stands for ``deferred``, or None: the logits are here, or nobody reads them."""
        if not isinstance(deferred, DeferredLogits) or torch.compiler.is_compiling():
            return None
        return None if _only_walks(sys._getframe(2)) else deferred.unread()

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            names = list(self)[key]
            return self[names] if isinstance(names, str) else tuple(self[name] for name in names)
        if key == FIELD and (unread := self._unread(OrderedDict.get(self, key))) is not None:
            return unread
        return OrderedDict.__getitem__(self._read() if key == FIELD else self, key)

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of ``key``, or ``default``."""
        if key == FIELD and (unread := self._unread(OrderedDict.get(self, key))) is not None:
            return unread
        return OrderedDict.get(self._read() if key == FIELD else self, key, default)

    items, values = _reading("items"), _reading("values")
    popitem, copy = _reading("popitem"), _reading("copy")
    __or__, __ror__, __ne__ = _reading("__or__"), _reading("__ror__"), _reading("__ne__")

    def __eq__(self, other: object) -> Any:
        equal = super().__eq__
        for output in (self, other):
            if isinstance(output, LazyLogits):
                output._read()
        return equal(other)

    __hash__ = None  # type: ignore[assignment]

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values that are not None."""
        return tuple(self.values())

    def __reduce__(self) -> tuple[object, ...]:
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


_own_dict = OrderedDict.__dict__["__dict__"].__get__


def _dict_of(output: LazyLogits) -> dict[str, Any]:
    """Return the ``__dict__`` of an output without a read."""
    fields: dict[str, Any] = output.__dict__ if torch.compiler.is_compiling() else _own_dict(output)
    return fields


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


def _flatten(output: LazyLogits) -> tuple[list[object], tuple[tuple[str, ...], DeferredLogits | None]]:
    if not torch.compiler.is_compiling() and not _only_walks(sys._getframe(1)):
        _compute(output)
    held: dict[str, object] = dict(OrderedDict.items(output))
    deferred = held.get(FIELD)
    if not isinstance(deferred, DeferredLogits):
        return list(held.values()), (tuple(held), None)
    # For code that casts and moves tensors.
    held[FIELD] = torch.empty(0, dtype=deferred.dtype, device=deferred.device)
    return list(held.values()), (tuple(held), deferred)


def _flatten_with_keys(output: LazyLogits) -> tuple[list[tuple[Any, Any]], Any]:
    values, context = _flatten(output)
    return [
        (_pytree.MappingKey(name), value) for name, value in zip(context[0], values, strict=True)
    ], context


def _unflatten(
    cls: type[LazyLogits], values: Iterable[object], context: tuple[tuple[str, ...], DeferredLogits | None]
) -> LazyLogits:
    names, deferred = context
    held: dict[str, object] = dict(zip(names, values, strict=True))
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
    # What ``vars`` returns; it may see the logits.
    own_dict = property(lambda output: _dict_of(output._read()))
    namespace: dict[str, object] = {} if traced else {"__dict__": own_dict}
    if not more:
        namespace.update(__module__=output_class.__module__, __qualname__=output_class.__qualname__)
        return type(name, bases, namespace if traced else {**namespace, "_plain": output_class})
    if requested_call.FIELD in more:
        namespace.update((name, property(_of_aux(name))) for name in requested_call.ALSO if name not in more)
    added = [(name, Any, field(default=None)) for name in more]
    lazy: type[LazyLogits] = make_dataclass(
        name, added, bases=bases, init=False, eq=False, namespace=namespace
    )
    lazy.__module__ = output_class.__module__
    return lazy


#: dynamo reads classes from here: what is constant for it cannot return a class.
_TRACED: dict[tuple[type, tuple[str, ...]], type[LazyLogits]] = {}


def _make_traced(output_class: type, more: tuple[str, ...]) -> bool:
    _TRACED[output_class, more] = lazy_class(output_class, more, traced=True)
    return True


# See `veomni_hook.kernels.slot.compiled`.
setattr(_make_traced, "_dynamo_marked_constant", True)  # noqa: B010 - mypy knows no such attribute


def with_deferred_logits(output: Any, more: Mapping[str, object] | None = None) -> Any:
    """Return ``output`` as an output whose `DeferredLogits` are computed when first read.

    ``more`` are further fields and their values. An output that is not a ``ModelOutput`` cannot defer logits
    and gets them now. If the call asked for log-probabilities, there are no logits and no loss.
    """
    more = {} if more is None else more
    asked = requested_call.FIELD in more
    if not isinstance(output, ModelOutput):
        output.logits = None if asked else output.logits.compute()
        for name, value in more.items():
            setattr(output, name, value)
        return output
    kind: Any = type(output)
    names = tuple(more)
    if torch.compiler.is_compiling():
        _make_traced(kind, names)
        lazy = _TRACED[kind, names]
    else:
        lazy = lazy_class(kind, names)
    values = {field.name: getattr(output, field.name) for field in fields(output)}
    if asked:
        values = {**values, "loss": None, FIELD: None}
    return lazy(**values, **more)


def _of_aux(name: str) -> Callable[[Any], Any]:
    return lambda output: getattr(getattr(output, requested_call.FIELD), name, None)


def _rebuilt(output_class: type, more: tuple[str, ...], values: tuple[object, ...]) -> LazyLogits:
    return lazy_class(output_class, more)(*values)
