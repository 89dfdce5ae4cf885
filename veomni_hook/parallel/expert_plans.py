"""Which parameters of a model are divided by expert, from what the code of its experts computes; by whom.

Experts are recognised by the op ``moe_experts``: a class with a slot of that op, whose parameters are all
stacked over the experts. transformers' own plan, a list of paths in the model's config, is kept for what is
not recognised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import ParallelError
from veomni_hook.kernels.explain.places import places_of
from veomni_hook.kernels.moe_experts.variants import Whole
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.parallel import process

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MARK", "dispatched", "ep_size", "experts_of", "is_ours", "plan_of"]

#: On a model, or its ``distributed_config``: how many processes share its experts as the setting asked.
MARK = "_veomni_ep"
_OP = "moe_experts"
_DISPATCHED, _DIVIDED = "ep_dispatch_experts", "grouped_gemm"


def plan_of(model: Any, size: int) -> dict[str, str]:
    """Return the expert plan of ``model`` for ``size`` ranks; keys have ``*`` for numbers of layers.

    transformers' rules for modules that are not experts are left out: they are for ranks that share a batch.

    Raises:
        ParallelError: no experts that can be divided, or ``size`` does not divide their number.
    """
    plan, whole = _of_upstream(model), dict[str, str]()
    for name, module in experts_of(model):
        reason = _indivisible(module)
        key = _for_all_layers(name)
        if reason is not None:
            whole.setdefault(type(module).__name__, reason)
            continue
        plan[key] = _DISPATCHED
        plan |= {f"{key}.{parameter}": _DIVIDED for parameter, _ in module.named_parameters(recurse=False)}
    if not plan:
        named = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
        whole = whole or {type(module).__name__: "their code is not recognised" for module in named}
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in whole.items())
        what = f"its experts cannot be divided: {reasons}" if whole else "it has no experts"
        raise _error(model, size, what)
    for name, module in dispatched(model, plan):
        count = getattr(module, "num_experts", None)
        if count is not None and count % size:
            legal = ", ".join(str(divisor) for divisor in range(2, count + 1) if count % divisor == 0)
            raise _error(model, size, f"{name} has {count} experts, which ep={size} does not divide", legal)
    return plan


def _of_upstream(model: nn.Module) -> dict[str, str]:
    """Return transformers' rules for the model's dispatched experts and what is in them."""
    rules: dict[str, str] = dict(getattr(model, "ep_plan", None) or {})
    names = {_for_all_layers(name) for name, _ in model.named_modules()}
    experts = tuple(name for name, style in rules.items() if style == _DISPATCHED and name in names)
    inside = tuple(f"{name}." for name in experts)
    return {name: style for name, style in rules.items() if name in experts or name.startswith(inside)}


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules whose class computes experts, by name."""
    kinds: dict[type, bool] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = any(place.slot.op == _OP for place in places_of(kind))
        if kinds[kind]:
            yield name, module


def _indivisible(module: Any) -> str | None:
    """Return why the experts of a module cannot be divided, or None."""
    (place, *_) = (place for place in places_of(type(module)) if place.slot.op == _OP)
    row = registry.variant(_OP, place.slot.variant)
    if row is not None and isinstance(row.form, Whole):
        return row.form.reason
    parameters = dict(module.named_parameters(recurse=False))
    if not hasattr(module, "num_experts"):
        return "they have no num_experts, which transformers divides"
    if not parameters or len(parameters) != len([*module.parameters()]):
        return "their weights are in submodules"
    numbers = {name: parameter.shape[0] for name, parameter in parameters.items()}
    numbers["num_experts"] = module.num_experts
    if len(set(numbers.values())) > 1:
        counts = ", ".join(f"{name}: {count}" for name, count in numbers.items())
        return f"their tensors are not stacked over one number of experts ({counts})"
    return None


def dispatched(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the modules of experts that a plan divides, by name."""
    for name, module in model.named_modules():
        if plan.get(_for_all_layers(name)) == _DISPATCHED:
            yield name, module


def _for_all_layers(name: str) -> str:
    """Return the name of a module or parameter as a key of transformers' plans."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)


def _error(model: Any, size: int, what: str, legal: str = "") -> ParallelError:
    return ParallelError(
        f"ep={size} cannot be used for {type(model).__name__}: {what}",
        where=process.SETTING,
        fix=f"choose ep from {legal}"
        if legal
        else "remove ep, or load this model with distributed_config=DistributedConfig() to keep it whole",
    )


def is_ours(model: object) -> bool:
    """Whether a model's experts are divided because the setting asked for it."""
    return hasattr(model, MARK) or hasattr(_given_to(model), MARK)


def ep_size(model: object) -> int:
    """Return how many processes share the experts of a model, whoever divided them."""
    return getattr(model, MARK, None) or getattr(_given_to(model), "ep_size", None) or 1


def _given_to(model: object) -> Any:
    """Return the ``distributed_config`` of a model, or None."""
    return getattr(getattr(model, "config", None), "distributed_config", None)
