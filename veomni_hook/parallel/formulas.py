"""Which implementations of attention a ring of processes may compute itself: those whose formula is known.

A ring merges sums that no implementation returns, so it never runs the user's. It knows transformers'
function for torch's fused attention, and eager functions whose code is one of the recogniser's patterns. Any
other has a reason: a function that the user has registered or replaced, or that computes something else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from veomni_hook.kernels.shared.traced_frame import answered_while_tracing
from veomni_hook.kernels.slot.guards import executed_source
from veomni_hook.parallel.partial_attention import Formula

__all__ = ["Known", "known"]

_FUSED_HOME, _FUSED = "transformers.integrations.sdpa_attention", "sdpa_attention_forward"
#: The pattern that is no variant of kernels.
_PLAIN = "plain"
#: Operands that change what the fused function computes, besides those that are refused before.
_CHANGES = ("softcap", "s_aux", "sinks")


class Known(NamedTuple):
    """What a call computes.

    Attributes:
        formula: what the scores are.
        causal: whether, without a mask, a position sees those up to itself only.
        sinks: ``[all heads]``, or None.
    """

    formula: Formula
    causal: bool
    sinks: torch.Tensor | None = None


def known(
    implementation: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    mask: Any,
    others: tuple[object, ...],
    operands: dict[str, Any],
) -> Known | str:
    """Return what a call of ``implementation`` computes, or why a ring of processes cannot compute it."""
    if reason := _refusal(query.shape[1], mask, others, operands):
        return reason
    function = _below_slot(implementation)
    pattern, reason = _pattern(function)
    if reason:
        return f"its implementation `{getattr(function, '__name__', function)}` is not known: {reason}"
    width, softcap, causal = query.shape[3], None, False
    sinks: Any = None
    if pattern == _FUSED:
        if changed := next((operand for operand in _CHANGES if operands.get(operand) is not None), None):
            return f"it has the operand `{changed}`"
        told = operands.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if told is None else told)
    elif pattern == "softcap":
        softcap, width = operands.get("softcap"), getattr(module, "head_dim", width)
    elif pattern.startswith("sinks"):
        sinks = module.sinks
    scaling = operands.get("scaling")
    return Known(Formula(float(width**-0.5 if scaling is None else scaling), softcap), causal, sinks)


def _below_slot(implementation: Any) -> Any:
    """Return upstream's function where a slot would ask kernels in front of it."""
    if not isinstance(implementation, partial):
        return implementation
    slot = type(getattr(implementation.func, "__self__", None))
    return (
        implementation.args[-1] if slot.__module__.startswith("veomni_hook.kernels.slot.") else implementation
    )


def _refusal(heads: int, mask: Any, others: tuple[object, ...], operands: dict[str, Any]) -> str:
    """Return what no ring computes in a call, or nothing."""
    reasons = {
        "its implementation is called with more positions than the mask": bool(others),
        "it has dropout": bool(operands.get("dropout")),
        "its scaling or softcap is a tensor": any(
            isinstance(operands.get(name), torch.Tensor) for name in ("scaling", "softcap")
        ),
    }
    return next((reason for reason, met in reasons.items() if met), "") or _unknown_mask(mask, heads)


def _unknown_mask(mask: Any, heads: int) -> str:
    if mask is None:
        return ""
    dense = type(mask) is torch.Tensor and (mask.dtype is torch.bool or mask.is_floating_point())
    if not dense or mask.dim() != 4 or mask.requires_grad:
        return f"its mask is a {type(mask).__name__}, not constant numbers or booleans of four dimensions"
    if mask.shape[1] not in (1, heads) or mask.shape[2] not in (1, mask.shape[3]):
        return f"its mask is {list(mask.shape)}, not of {heads} heads, or one, and as many queries as keys"
    return ""


@answered_while_tracing
def _pattern(function: Any) -> tuple[str, str]:
    """Return the pattern that an eager function is, or the fused one's name; or nothing and the reason."""
    if function is getattr(sys.modules.get(_FUSED_HOME), _FUSED, None):
        return _FUSED, ""
    code = getattr(function, "__code__", None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if not isinstance(code, CodeType) or module is None:
        return "", "it is no function of a module"
    if (source := executed_source(module)) is None:
        return "", "its source is not there"
    pattern, reason, codes = _read(source, function.__name__)
    if any(getattr(vars(module).get(name), "__code__", None) != text for name, text in codes.items()):
        return "", "it, or a function that it calls, was replaced"
    return ("", "it was replaced") if codes and codes[function.__name__] != code else (pattern, reason)


@lru_cache(maxsize=64)
def _read(source: str, name: str) -> tuple[str, str, dict[str, CodeType | None]]:
    """Return what a function of a module's source is, why not, and the code of what was read for that."""
    from veomni_hook.kernels.slot.comparison import definition
    from veomni_hook.patches.code.document import Document
    from veomni_hook.patches.graph import (
        ARGUMENT,
        Difference,
        Form,
        canonical,
        recognised,
        reference_names,
    )
    from veomni_hook.patches.routes.view import ModuleView
    from veomni_hook.patterns import pattern_file

    view = ModuleView(Document(source))
    function = view.functions.get(name)
    if function is None or (why := view.why_unclear(function)):
        return "", "its text is not there" if function is None else why, {}
    form = canonical(function, view.scope)
    path = pattern_file("attention")
    names = (_PLAIN, *reference_names(path))
    outcome = recognised(path, form, {}, names=names, otherwise=ARGUMENT)
    if isinstance(outcome, Difference) or not isinstance(form, Form):
        return "", f"it computes something else ({getattr(outcome, 'text', '')})", {}
    pattern, matched = outcome
    if wrong := [hole for hole, operand in matched.bindings.items() if operand.value != hole]:
        return "", f"its parameters have other names than {', '.join(wrong)}", {}
    compiled = compile(source, "", "exec", dont_inherit=True)
    return pattern, "", {one: definition(compiled, one) for one in (name, *form.inlined)}
