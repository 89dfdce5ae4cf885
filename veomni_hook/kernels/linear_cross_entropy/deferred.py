"""Logits that were not computed: the call that makes them, and the tensor that stands for them.

``outputs.logits`` is an `UnreadLogits`: a tensor without memory. It knows its shape, dtype and device. Its
argmax over the vocabulary is computed in chunks, and a selection of a few positions from their hidden states.
Any other use computes all logits, and the model computes them with the upstream code from its next step on.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import EllipsisType, NoneType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree

from veomni_hook.errors import VeomniHookWarning
from veomni_hook.kernels.linear_cross_entropy.head import keeps_weights, logits_of
from veomni_hook.kernels.linear_cross_entropy.linear_call import LinearCall
from veomni_hook.kernels.linear_cross_entropy.objective import Transform
from veomni_hook.kernels.linear_cross_entropy.options import READ, READ_IN_EVALUATION, SWITCHED_OFF

__all__ = ["DeferredLogits", "UnreadLogits", "logits_are_read", "note_refusal"]

logger = logging.getLogger("veomni_hook.kernels")

#: Packages through whose functions a read comes.
_BETWEEN = ("veomni_hook", "torch", "collections", "copy", "dataclasses", "pickle")
#: A selection of at most one position in so many is computed by itself.
FEW = 8
#: Elements of the logits that an argmax holds at a time. With a quarter, an H200 takes 18 ms, not 11, for
#: 16,384 x 1,024 x 151,936.
CHUNK = 1 << 26

#: Why a model computes its logits with the upstream code, in training (True) and in evaluation (False).
_upstream_only: dict[bool, WeakKeyDictionary[Any, str]] = {
    True: WeakKeyDictionary(),
    False: WeakKeyDictionary(),
}


def logits_are_read(model: Any) -> str | None:
    """Return why ``model`` computes its logits with the upstream code from now on, or None."""
    return _upstream_only[bool(model.training)].get(model)


def note_refusal(model: object, reason: str, *, training: bool) -> None:
    """Make ``model`` use the upstream code from its next call on, in training or in evaluation."""
    _upstream_only[training][model] = reason


def _reader() -> tuple[str, int, dict[str, Any]]:
    """Return file, line and globals of the code that reads, which is neither this package's nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _BETWEEN:
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals


class DeferredLogits:
    """Logits that have not been read yet: the call that makes them, and the state of the forward.

    ``linear`` is the module in ``head`` that holds the weights, ``hidden_states`` the input of ``head`` and
    ``call`` that of ``linear``; ``transform`` is applied to the logits.
    """

    def __init__(
        self,
        model: Any,
        head: Any,
        linear: nn.Module,
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
        self.logits: torch.Tensor | None = None

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

    def to(self, device: Any = None, dtype: torch.dtype | None = None, **_: object) -> DeferredLogits:
        """Return deferred logits that will be moved to ``device`` and cast to ``dtype``."""
        other = object.__new__(type(self))
        moved = self._moved if device is None else torch.device(device)
        cast = self._cast if dtype is None else dtype
        other.__dict__.update(self.__dict__, _moved=moved, _cast=cast, logits=None)
        return other

    def unread(self) -> torch.Tensor | None:
        """Return the logits as `UnreadLogits`, or computed where only a call of the head can compute them.

        None if they cannot stay unread.
        """
        if self.logits is not None or self._hidden_states.is_inference() or not self.operands:
            return self.compute()
        return UnreadLogits.of(self, self._hidden_states)

    def compute(self) -> torch.Tensor:
        """Return the logits, once; from the next step on, the model computes them in its forward."""
        if self.logits is None:
            model = self._model()
            if model is not None:
                if self._training and logits_are_read(model) is None and not torch.compiler.is_compiling():
                    logger.warning(SWITCHED_OFF, type(model).__name__, "{}:{}".format(*_reader()[:2]))
                reason = READ if self._training else READ_IN_EVALUATION
                note_refusal(model, reason, training=self._training)
            self.logits = self.rows()
        return self.logits

    def rows(self, hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of ``hidden_states``, a selection of the call's; None: of all."""
        kind = self._hidden_states.device.type
        autocast = torch.autocast(kind, dtype=self._autocast, enabled=self._autocast is not None)
        with torch.inference_mode(mode=False), torch.set_grad_enabled(self._grad), autocast:
            product = None if self._call is None else self._call.result(hidden_states)
            if product is None:
                rows = self._hidden_states if hidden_states is None else hidden_states
                product = logits_of(self._head, self._linear, rows, self._weights)
            logits, changed = self._transform(product[0]), product[1]
        if self._version is not None and self._hidden_states._version != self._version:
            changed = "the hidden states have changed"
        if changed is not None:
            file, line, of_module = _reader()
            warnings.warn_explicit(
                f"outputs.logits is read, and {changed}: these logits may not be those of the forward pass. "
                "Read them before that, at the latest before optimizer.step().",
                VeomniHookWarning,
                file,
                line,
                registry=of_module.setdefault("__warningregistry__", {}),
            )
        return logits.to(self._moved or logits.device, self._cast or logits.dtype)

    @property
    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """The weight ``[vocab, hidden]`` and the bias ``[vocab]`` of the call; empty: they are not kept."""
        return () if self._call is None or self._call.is_released else self._call.operands


class UnreadLogits(torch.Tensor):
    """Logits ``[..., vocab]``, or a selection of their positions, that are computed when they are needed.

    Python functions of torch get computed logits through ``__torch_function__``, kernels of C++ through
    ``__torch_dispatch__``. An autograd function that gets this tensor itself sends its gradient to `_Edge`.
    """

    _deferred: DeferredLogits
    #: ``[..., hidden]``: the hidden states of these positions.
    _hidden_states: torch.Tensor
    #: The indices that select them, one after another.
    _selection: tuple[Any, ...]
    #: Whether they are part of the graph.
    _attached: bool
    _logits: torch.Tensor | None

    @staticmethod
    def of(
        deferred: DeferredLogits, hidden_states: torch.Tensor, indices: tuple[object, ...] = ()
    ) -> torch.Tensor:
        """Return the tensor that stands for the logits of ``hidden_states``, which ``indices`` select."""
        attached = deferred._grad and (not indices or torch.is_grad_enabled())
        with torch.set_grad_enabled(attached):
            unread: UnreadLogits = _Edge.apply(  # type: ignore[no-untyped-call]
                deferred, indices, attached, hidden_states, *deferred.operands
            )
        if not _living:
            _watch_optimizers()
        _living[id(unread)] = unread
        return unread

    @torch.compiler.disable
    def computed(self, *, to_be_changed: bool = False) -> torch.Tensor:
        """Return the logits, once; ``to_be_changed``: as a view of all logits."""
        deferred = self._deferred
        if self._logits is None or (to_be_changed and deferred.logits is None):
            few = FEW * self._hidden_states[..., 0].numel() <= deferred._hidden_states[..., 0].numel()
            if self._selection and few and not to_be_changed and deferred.logits is None:
                logits = deferred.rows(self._hidden_states)
            else:
                logits = deferred.compute()
                with torch.set_grad_enabled(self._attached):
                    for index in self._selection:
                        logits = logits[index]
            self._logits = logits if self._attached else logits.detach()
        return self._logits

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_FORM:
                return func(*args, **kwargs)
            answer = _ANSWERS.get(func)
            if answer is not None and isinstance(args[0] if args else None, cls):
                result = answer(*args, **kwargs)
                if result is not None:
                    return result
        args, kwargs = _computed((args, kwargs), to_be_changed=_changes(func, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        args, kwargs = _computed((args, kwargs or {}), to_be_changed=True)
        return func(*args, **kwargs)


class _Edge(torch.autograd.Function):
    """The place of unread logits in the graph: the backward pass computes logits, and their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        deferred: DeferredLogits,
        indices: tuple[object, ...],
        attached: bool,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.deferred, ctx.operands = deferred, (hidden_states, weight, bias)
        shape = (*hidden_states.shape[:-1], weight.shape[0])
        unread: UnreadLogits = torch.Tensor._make_wrapper_subclass(
            UnreadLogits, shape, dtype=deferred.dtype, device=deferred.device
        )
        unread._deferred, unread._hidden_states, unread._selection = deferred, hidden_states, indices
        unread._attached, unread._logits = attached, None
        return unread

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        inputs = [tensor for tensor in ctx.operands if tensor is not None and tensor.requires_grad]
        logits = ctx.deferred.rows(ctx.operands[0])
        gradients = dict(
            zip(
                map(id, inputs),
                torch.autograd.grad(logits, inputs, gradient, create_graph=create_graph),
                strict=True,
            )
        )
        return None, None, None, *(gradients.get(id(tensor)) for tensor in ctx.operands)


def _argmax(
    logits: UnreadLogits,
    dim: int | None = None,
    keepdim: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """Return the argmax over the vocabulary in chunks of positions, or None: it is over something else."""
    dim = others.pop("axis", dim)
    if others or dim not in (-1, logits.ndim - 1) or logits._logits is not None or not logits.numel():
        return None
    rows = logits._hidden_states.flatten(0, -2)
    step = max(1, CHUNK // logits.shape[-1])
    with torch.no_grad():
        parts = [
            logits._deferred.rows(part).argmax(-1)
            for part in rows.tensor_split(tuple(range(step, len(rows), step)))
        ]
    best = torch.cat(parts).view(logits.shape[:-1])
    return best.unsqueeze(-1) if keepdim else best


def _selected(logits: UnreadLogits, index: Any) -> torch.Tensor | None:
    """Return the selection of whole positions, or None: ``index`` is about more than positions."""
    if logits._logits is not None or not _selects_positions(index, logits.ndim):
        return None
    # Hidden states have the dimensions of logits, but for the width of the last.
    return UnreadLogits.of(logits._deferred, logits._hidden_states[index], (*logits._selection, index))


def _selects_positions(index: object, ndim: int) -> bool:
    """Return whether an index of a tensor of ``ndim`` dimensions leaves the last one as it is."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, bool) or not isinstance(item, _INDICES) for item in items):
        return False
    if items and isinstance(items[-1], slice) and items[-1] == slice(None):
        return True
    # What follows an ellipsis counts from the last dimension.
    return not any(item is Ellipsis for item in items[:-1]) and sum(map(_dimensions, items)) < ndim


def _dimensions(item: object) -> int:
    """Return how many dimensions of a tensor an item of an index is about."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _detached(logits: UnreadLogits) -> torch.Tensor | None:
    """Return the logits without gradients, in the same memory if they are computed."""
    with torch.no_grad():
        return _selected(logits, Ellipsis)


def _computed(arguments: object, *, to_be_changed: bool) -> Any:
    return _pytree.tree_map_only(
        UnreadLogits, lambda logits: logits.computed(to_be_changed=to_be_changed), arguments
    )


def _changes(func: Callable[..., object], kwargs: Mapping[str, object]) -> bool:
    """Return whether ``func`` may write into its arguments, as far as torch's names tell."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith(("__i", "__set")) or bool({"out", "inplace"} & kwargs.keys())


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_compute_living)


def _compute_living(*_: object) -> None:
    """Compute the logits that somebody holds, before an optimizer changes the weights."""
    for unread in list(_living.values()):
        unread.computed()


_INDICES = (int, slice, torch.Tensor, EllipsisType, NoneType)
_OF_FORM = frozenset(
    [
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "device", "dtype", "is_cpu", "is_cuda", "itemsize", "layout", "ndim", "requires_grad",
                "shape",
            )
        ),
        *(
            getattr(torch.Tensor, name)
            for name in (
                "__hash__", "__len__", "dim", "element_size", "is_complex", "is_contiguous",
                "is_floating_point", "ndimension", "nelement", "numel", "size", "stride",
            )
        ),
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
    ]
)  # fmt: skip
_ANSWERS: dict[Callable[..., Any], Callable[..., torch.Tensor | None]] = {
    torch.Tensor.__getitem__: _selected,
    torch.Tensor.argmax: _argmax,
    torch.argmax: _argmax,
    torch.Tensor.detach: _detached,
    torch.detach: _detached,
}
#: By their id: equality of tensors is that of their elements.
_living: WeakValueDictionary[int, UnreadLogits] = WeakValueDictionary()
