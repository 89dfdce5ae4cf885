"""PEFT's adapters of experts' stacked weights (``target_parameters``), as factors for the kernels.

PEFT's ``ParamWrapper`` puts the sum of weight and adapter in the weight's place before every call, for all
experts at once, and its gradient is as large as the weight's. `watch` wraps the method that does this. Where
kernels that take adapters compute the experts, an `AdaptedWeight` stands in the weight's place instead, for
the same time. Whoever else reads it gets the sum, by PEFT's own formula, so nothing depends on whether a
kernel takes the call.

The layout of the factors is checked once for each class: PEFT's ``get_delta_weight`` has to return the same
for small numbers. Parameters, state dicts and saved adapters are PEFT's own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, wraps
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, compiler, nn
from torch.utils._python_dispatch import _disable_current_modes

from veomni_hook.kernels.moe_experts.low_rank import AdaptedWeight, Part
from veomni_hook.kernels.moe_experts.variants import LAYOUTS
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.shared.adapters import inactive
from veomni_hook.kernels.shared.operand_checks import not_plain
from veomni_hook.kernels.shared.repeated import decided, is_again
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.slot.candidates import Answers
from veomni_hook.kernels.slot.record import FIRST_CALL

__all__ = ["remark", "watch"]

_HOME, _KIND, _METHOD = "peft.tuners.lora.layer", "ParamWrapper", "_activate_lora"
#: The backends of `LAYOUTS` that take adapters.
_TAKING = frozenset(("float8", "mxfp8", "torch", "triton"))
_STACKED = 3

#: By module of experts, for each of its parameters: PEFT's wrapper, and why it is left to PEFT, or None.
_LEFT: WeakKeyDictionary[Any, dict[str, tuple[ref[Any], str | None]]] = WeakKeyDictionary()
#: By class: the slots of experts that its forward asks.
_SLOTS: WeakKeyDictionary[type, tuple[Slot, ...]] = WeakKeyDictionary()


def watch(*_: object) -> None:
    """Wrap PEFT's method, now or at a first call of experts: PEFT may be imported after the model."""
    if _at_first_call not in FIRST_CALL:
        FIRST_CALL.append(_at_first_call)
    kind = getattr(sys.modules.get(_HOME), _KIND, None)
    upstream = None if kind is None else vars(kind).get(_METHOD)
    if upstream is None or hasattr(upstream, "veomni_watched"):
        return

    @wraps(upstream)
    def activate(wrapper: Any, active_adapters: list[str]) -> AbstractContextManager[None]:
        # A checkpoint may repeat a call that was made before `watch`.
        if compiler.is_compiling() or not decided((_METHOD, id(wrapper)), lambda: not is_again()):
            return upstream(wrapper, active_adapters)  # type: ignore[no-any-return]
        names = [name for name in active_adapters or () if name in wrapper.lora_A]
        slots = _slots_of(owner := wrapper.get_base_layer()) if names else ()
        if len(slots) != 1:
            return upstream(wrapper, active_adapters)  # type: ignore[no-any-return]
        left = _LEFT.setdefault(owner, {})
        if (answers := slots[0].answers(owner)).idle is not None:
            left.pop(wrapper.parameter_name, None)
            return upstream(wrapper, active_adapters)  # type: ignore[no-any-return]
        reason = _why_left(wrapper, owner, names, answers)
        left[wrapper.parameter_name] = ref(wrapper), reason
        if reason is not None:
            return upstream(wrapper, active_adapters)  # type: ignore[no-any-return]
        return _lent(wrapper, owner, names)

    vars(activate)["veomni_watched"] = True
    setattr(kind, _METHOD, activate)


def remark(owner: object, backend: str) -> str | None:
    """Return what became of the adapters of the experts ``owner``, which ``backend`` computed, or None."""
    told, fused = [], []
    for name, (wrapper, why) in sorted(_LEFT.get(owner, {}).items()):
        wrapped = wrapper()
        if wrapped is None:  # the adapters were unloaded
            continue
        if (state := inactive(wrapped)) is not None:
            told.append(f"adapter of {name} {state}")
        elif why:
            told.append(f"adapter of {name} added to the weight by PEFT: {why}")
        else:
            fused.append(name)
    if fused:
        done = (
            "adapter fused"
            if backend in _TAKING
            else "adapter added to the weight, as upstream's code reads it"
        )
        told.insert(0, f"{done} ({', '.join(fused)})")
    return "; ".join(told) or None


def _at_first_call(_: str, owner: object) -> None:
    # Only a module that PEFT has changed already, at its first call, needs this.
    if hasattr(owner, "parametrizations"):
        watch()


@contextmanager
def _lent(wrapper: Any, owner: Any, names: list[str]) -> Iterator[None]:
    """Let an `AdaptedWeight` stand in the weight's place."""
    name, parameter = wrapper.parameter_name, vars(owner)
    outer: AdaptedWeight | None = parameter.get(name)
    weight = owner._parameters[name] if outer is None else outer.weight
    own = tuple(Part(*_sides(wrapper, name), float(wrapper.scaling[name])) for name in names)
    parts = own if outer is None else (*outer.parts, *own)

    def add() -> Tensor:
        return _sum(wrapper, weight if outer is None else outer.total(), names)

    parameter[name] = AdaptedWeight(weight, parts, add)
    try:
        yield
    finally:
        if outer is None:
            del parameter[name]
        else:
            parameter[name] = outer


def _sum(wrapper: Any, weight: Tensor, names: list[str]) -> Tensor:
    """Return what PEFT puts in the weight's place."""
    if len(names) == 1 and hasattr(wrapper, "get_delta_factors"):
        left, right, scale = wrapper.get_delta_factors(names[0])
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, left, right, alpha=scale)
    delta: Tensor = wrapper.get_delta_weight(names[0])
    for name in names[1:]:
        delta = delta + wrapper.get_delta_weight(name)
    return weight + delta


def _sides(wrapper: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the factors [E, d1, r] and [E, r, d2] of an adapter of a weight [E, d1, d2], as views."""
    experts = wrapper.num_experts
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    a = a.reshape(experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    if getattr(wrapper, "_did_swap_in_out_features", False):
        return b, a
    return a.transpose(1, 2), b.transpose(1, 2)


def _slots_of(owner: object) -> tuple[Slot, ...]:
    """Return the slots of experts with stacked weights that a module's forward asks."""
    kind = type(owner)
    if (known := _SLOTS.get(kind)) is not None:
        return known
    forward: Any = inspect.unwrap(getattr(kind, "forward", _slots_of))
    code, scope = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    slots = []
    for name in () if code is None else code.co_names:
        slot = scope.get(name)
        if type(slot) is Slot and slot.op == "moe_experts":
            layout = LAYOUTS.get(slot.variant)
            if layout is not None and layout.fused:
                slots.append(slot)
    return _SLOTS.setdefault(kind, tuple(slots))


def _why_left(wrapper: Any, owner: nn.Module, names: list[str], answers: Answers) -> str | None:
    """Return why PEFT's own sum has to stand in the weight's place, or None."""
    name = wrapper.parameter_name
    weight = owner._parameters.get(name)
    if not isinstance(weight, Tensor):
        return "something else has changed the parameter"
    candidates = answers.candidates(weight.device.type)
    backend = candidates[0].backend if candidates else EAGER
    if backend not in _TAKING:
        return f"{backend} does not take adapters"
    return _unsuited(wrapper, weight, names)


def _unsuited(wrapper: Any, weight: Tensor, names: list[str]) -> str | None:
    factors = [adapters[name].weight for adapters in (wrapper.lora_A, wrapper.lora_B) for name in names]
    if (reason := not_plain(weight, *factors)) is not None:
        return reason
    if weight.ndim != _STACKED or wrapper.num_experts != weight.shape[0] or wrapper.num_experts == 1:
        return f"the weight has the shape {[*weight.shape]}"
    for factor in (weight, *factors):
        if not factor.is_floating_point() or factor.dtype.itemsize == 1 or factor.device != weight.device:
            return f"a factor or the weight is {factor.dtype} on {factor.device}"
    if any(name in getattr(wrapper, "lora_variant", ()) for name in names):
        return "the adapter is a variant of LoRA"
    for left, right in (_sides(wrapper, name) for name in names):
        if left.shape[:2] != weight.shape[:2] or right.shape[::2] != weight.shape[::2]:
            return f"factors {[*left.shape]} and {[*right.shape]} do not fit the weight {[*weight.shape]}"
    return _unknown_formula(type(wrapper), getattr(wrapper, "_did_swap_in_out_features", None))


def _unknown_formula(kind: Any, swapped: Any) -> str | None:
    try:
        with _disable_current_modes():  # numbers of fake tensors cannot be compared
            known = _is_known(kind, swapped)
    except Exception as error:
        return f"PEFT's formula could not be checked: {error!r}"
    return None if known else "this release of PEFT computes another formula"


@lru_cache(maxsize=16)
def _is_known(kind: Hashable, swapped: Hashable) -> bool:
    """Return whether ``get_delta_weight`` of a class computes what `_sides` and the scaling give."""
    experts, rank, first, second = 2, 3, 5, 4
    inner, outer = (second, first) if swapped else (first, second)

    def numbers(*shape: int) -> SimpleNamespace:
        size = shape[0] * shape[1]
        return SimpleNamespace(weight=torch.arange(size, dtype=torch.float32, device="cpu").sin().view(shape))

    weight = torch.zeros(experts, first, second, device="cpu")
    wrapper = SimpleNamespace(
        num_experts=experts,
        lora_A={"a": numbers(rank * experts, inner)},
        lora_B={"a": numbers(outer, rank * experts)},
        scaling={"a": 0.75},
        get_param=lambda: weight,
        get_base_layer=lambda: None,
    )
    if swapped is not None:
        wrapper._did_swap_in_out_features = swapped
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        left, right = _sides(wrapper, "a")
        delta: Callable[..., Tensor] = getattr(kind, "get_delta_weight")  # noqa: B009 - a hashable, to mypy
        return torch.allclose(delta(wrapper, "a"), 0.75 * left @ right, atol=1e-5)
