"""Computes the loss inside the head's ``__call__``, so that hooks of FSDP2, ZeRO-3 and offloading still run.

The head's last ``nn.Linear`` is called with a `LossInput` in place of hidden states. ``nn.Linear.forward``
passes it, with the weights that hooks have gathered, to ``torch.nn.functional.linear``, where
``__torch_function__`` computes the loss. `refuses` rejects heads whose ``forward`` or hooks expect logits.
Checks that need the gathered weights run in `LossRequest.answer`, which returns the logits if they fail.

A head may be a module around that Linear, also PEFT's around a copy of the head that is trained. It is
called as usual, and its result is accepted only if it is the loss that was computed inside it. PEFT's wrapper
(``modules_to_save``) holds the ``original_module`` and one copy for each adapter. It is recognised by this
structure, so that PEFT need not be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as module_globals
from torch.utils import _pytree

from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy.linear_call import WEIGHTS_CHANGED, LinearCall, Sample, differ
from veomni_hook.kernels.shared.module_calls import call_is_overridden, is_linear
from veomni_hook.kernels.shared.operand_checks import not_plain
from veomni_hook.kernels.shared.origin import written_in

__all__ = [
    "LossInput",
    "LossRequest",
    "ask",
    "called_by",
    "calls_refuse",
    "keeps_weights",
    "last_linear",
    "logits_of",
    "refuses",
    "still_called",
    "unsuited",
]

# Their hooks gather, move and release tensors; they do not use values.
KNOWN_HOOKS = ("torch.distributed.", "accelerate.", "deepspeed.")


class LossRequest:
    """Asks the head to run ``compute`` over ``target`` ``[rows]``, which sets ``loss``.

    ``call`` is the call of its Linear, which returned the loss in place of logits.
    """

    def __init__(self, compute: Callable[..., torch.Tensor], target: torch.Tensor) -> None:
        self._compute = compute
        self._target = target
        self.loss: torch.Tensor | None = None
        self.reason: str | None = None
        self.call: LinearCall | None = None

    def answer(
        self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the loss, or the logits if these weights do not allow it (``reason`` says why)."""
        self.reason = unsuited(hidden_states, weight, bias)
        if self.reason is not None:
            return functional.linear(hidden_states, weight, bias)
        self.call = LinearCall(hidden_states, weight, bias)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        self.loss = self._compute(rows, weight, bias, self._target)
        return self.loss


class LogitsRequest:
    """Asks the head for logits; ``changed`` then tells whether its weights differ from ``before``."""

    def __init__(self, before: Sample) -> None:
        self._before = before
        self.changed: bool | None = None

    def answer(
        self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the logits."""
        if not_plain(*(tensor for tensor in (weight, bias) if tensor is not None)) is None:
            self.changed = differ(self._before, weight, bias)
        return functional.linear(hidden_states, weight, bias)


@dataclass
class LossInput:
    """Hidden states on their way into the head.

    A dataclass and a pytree node: depending on its version, FSDP2 looks for tensors in one or the other.
    """

    hidden_states: torch.Tensor
    request: LossRequest | LogitsRequest

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not functional.linear:
            return NotImplemented
        arguments = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
        carrier = arguments["input"]
        return carrier.request.answer(carrier.hidden_states, arguments["weight"], arguments.get("bias"))

    def to(self, *args: Any, **kwargs: Any) -> LossInput:
        """Move or cast the hidden states; accelerate's hooks call this."""
        return replace(self, hidden_states=self.hidden_states.to(*args, **kwargs))


_pytree.register_pytree_node(
    LossInput,
    lambda carrier: ([carrier.hidden_states], carrier.request),
    lambda leaves, request: LossInput(next(iter(leaves)), request),
    serialized_type_name="veomni_hook.kernels.linear_cross_entropy.LossInput",
)


def last_linear(model: object, head: object) -> Any:
    """Return the module inside ``head`` that computes logits; ``head`` itself if no other is known.

    Of a module that PEFT trains as a whole, it is the copy that a call reaches now.
    """
    if isinstance(head, nn.Linear) or not isinstance(head, nn.Module):
        return head
    embeddings = getattr(model, "get_output_embeddings", None)
    linear = embeddings() if callable(embeddings) else None
    within = linear is not None and _holds(head, linear)
    return called_by(linear if within else head)


def called_by(module: Any) -> Any:
    """Return what ``module`` calls with its arguments, or ``module`` itself if it is no wrapper."""
    if not _wraps(module):
        return module
    original, copies = module.original_module, module.modules_to_save
    active = getattr(module, "active_adapter", None) or ()
    names = (active,) if isinstance(active, str) else tuple(active)
    if getattr(module, "disable_adapters", False) or not names or any(name not in copies for name in names):
        return original
    return copies[names[0]]


def still_called(head: nn.Module, linear: object) -> bool:
    """Return whether a call of ``head`` reaches ``linear``, as far as wrappers decide it."""
    wrappers = (module for module in head.modules() if _wraps(module) and _holds(module, linear))
    return all(_holds(called_by(wrapper), linear) for wrapper in wrappers)


def _wraps(module: object) -> bool:
    held = getattr(module, "_modules", {})
    return isinstance(held.get("modules_to_save"), nn.ModuleDict) and held.get("original_module") is not None


def _holds(module: nn.Module, inner: object) -> bool:
    return any(module is inner for module in module.modules())


def ask(
    head: nn.Module, linear: nn.Module, hidden_states: torch.Tensor, request: LossRequest
) -> torch.Tensor:
    """Call ``head``, whose last Linear is ``linear``, and return the loss.

    On failure, returns logits and leaves ``request.loss`` None; ``request.reason`` says why.
    """
    try:
        answer = _answered(head, linear, hidden_states, request)
        changed = "something other than the result of its last Linear"
    except Exception as error:
        if linear is head or request.loss is None:
            raise
        answer, changed = hidden_states, f"no loss ({type(error).__name__})"
    if linear is head or request.loss is None or answer is request.loss:
        return answer
    request.loss, request.reason = None, f"the head returns {changed}"
    logits: torch.Tensor = head(hidden_states)
    return logits


def logits_of(
    head: nn.Module, linear: nn.Module, hidden_states: torch.Tensor, before: Sample
) -> tuple[torch.Tensor, str | None]:
    """Return the logits of ``head``, and why they may be others than with the weights ``before``, or None.

    Sharded weights are compared after hooks have gathered them. A call that reaches another copy of
    ``linear`` uses other weights.

    Raises:
        KernelError: the weights do not fit the hidden states any more.
    """
    if not still_called(head, linear):
        return head(hidden_states), WEIGHTS_CHANGED
    weight, bias = linear._parameters.get("weight"), linear._parameters.get("bias")
    if type(weight) is nn.Parameter and not weight.is_meta:
        if (reason := unsuited(hidden_states, weight, bias)) is not None:
            raise KernelError(
                f"outputs.logits can no longer be computed: {reason}",
                where=type(head).__name__,
                fix="read outputs.logits before the model is cast or moved",
            )
        if tuple(weight.shape) == before.shape:
            changed = WEIGHTS_CHANGED if differ(before, weight, bias) else refuses(head, linear)
            return head(hidden_states), changed
    if (reason := refuses(head, linear)) is not None:
        return head(hidden_states), reason
    request = LogitsRequest(before)
    logits = _answered(head, linear, hidden_states, request)
    unknown = f"it is unknown whether {WEIGHTS_CHANGED} since the forward pass"
    return logits, unknown if request.changed is None else WEIGHTS_CHANGED if request.changed else None


def keeps_weights(head: nn.Module, linear: object) -> bool:
    """Return whether no hook around a call of ``linear`` in ``head`` can bring weights and take them away."""
    return not any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        for module in head.modules()
        if _holds(module, linear)
    )


def _answered(
    head: nn.Module, linear: nn.Module, hidden_states: torch.Tensor, request: LossRequest | LogitsRequest
) -> torch.Tensor:
    """Return the result of ``head``, whose last Linear gets ``request`` with its input."""
    if linear is head:
        answer: torch.Tensor = head(LossInput(hidden_states, request))
        return answer
    hook = linear.register_forward_pre_hook(
        lambda _, args: (LossInput(args[0], request), *args[1:]) if args else None
    )
    try:
        answer = head(hidden_states)
        return answer
    finally:
        hook.remove()


def refuses(head: Any, linear: object) -> str | None:
    """Return why ``head``, whose last Linear is ``linear``, cannot compute a loss, or None."""
    reason = _linear_refuses(linear)
    if reason is not None or linear is head:
        return reason
    for module in head.modules():
        if _holds(module, linear) and (reason := calls_refuse(module)) is not None:
            return reason
    return None


def _linear_refuses(linear: Any) -> str | None:
    if not is_linear(type(linear)):
        return f"the head is a {type(linear).__name__}, whose forward is not that of nn.Linear"
    if "forward" in linear.__dict__ and not _accelerate_forward(linear):
        return "the head has its own forward"
    if functional.linear is not torch._C._nn.linear:
        return "torch.nn.functional.linear has been replaced"
    weight = linear._parameters.get("weight")
    sharded = type(weight).__module__.startswith(
        "torch.distributed."
    )  # `LossRequest.answer` sees it gathered
    if weight is not None and not sharded and not_plain(weight) is not None:
        return f"the weight of the head is a {type(weight).__name__}, not a plain tensor"
    global_hooks = (
        module_globals._global_forward_hooks,
        module_globals._global_forward_pre_hooks,
        module_globals._global_backward_hooks,
        module_globals._global_backward_pre_hooks,
    )
    return calls_refuse(linear) or ("a global hook is registered" if any(global_hooks) else None)


def calls_refuse(module: nn.Module) -> str | None:
    """Return what in a call of ``module`` may expect logits, or None."""
    if module._compiled_call_impl is not None:
        return "the head is compiled separately"
    if module._backward_hooks or module._backward_pre_hooks:
        return "the head has backward hooks, which expect gradients of logits"
    if (overridden := call_is_overridden(module)) is not None:
        return f"the head {overridden}"
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not _origin(hook).startswith(KNOWN_HOOKS):
            return f"the head has a hook from {_origin(hook) or 'an unknown place'}, which may expect logits"
    return None


def unsuited(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Return why no loss can be computed from these operands of ``torch.nn.functional.linear``, or None."""
    reason = not_plain(*(tensor for tensor in (hidden_states, weight, bias) if tensor is not None))
    if reason is not None:
        return reason
    if hidden_states.device != weight.device:
        return "hidden states and the head are on different devices"
    mixed = hidden_states.dtype is not weight.dtype or (bias is not None and bias.dtype is not weight.dtype)
    if mixed and not torch.is_autocast_enabled(weight.device.type):
        return "hidden states and the head have different dtypes"
    return None


def _accelerate_forward(head: nn.Module) -> bool:
    original = getattr(head, "_old_forward", None)
    standing = head.__dict__["forward"]
    return (
        getattr(original, "__func__", None) is nn.Linear.forward
        and hasattr(head, "_hf_hook")
        and type(head._hf_hook).__module__.startswith("accelerate.")
        and written_in(getattr(standing, "func", standing))[0].startswith("accelerate.")
    )


def _origin(hook: object) -> str:
    home = written_in(hook)[0]
    while home.startswith("torch._dynamo") and hasattr(hook, "__wrapped__"):
        hook = hook.__wrapped__  # `torch.compiler.disable` around it
        home = written_in(hook)[0]
    return home
