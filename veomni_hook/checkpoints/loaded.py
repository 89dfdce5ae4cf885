"""Raise if `from_pretrained` left experts at their random initialisation; transformers only warns.

The patched `transformers.modeling_utils` calls `give_list`, `before_loading` and `after_loading`;
`veomni_hook.patches.idioms.moe_experts.checkpoints` inserts these calls. They run both checks, or, if the
caller requested the list of missing tensors, add to it.

* `check_names` runs before anything is loaded. transformers stacks single experts in the order of their
  numbers and ignores the numbers themselves: with expert 3 missing and one too many at the end, every expert
  from 3 on is wrong, and nothing is reported.
* `check_loaded` runs at the end, on the missing, mismatched and unexpected tensors that transformers reports.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "after_loading",
    "allow_incomplete_experts",
    "before_loading",
    "check_loaded",
    "check_names",
    "give_list",
]

_ALLOWED: ContextVar[bool] = ContextVar("veomni_incomplete_experts", default=False)
#: The missing experts found so far in `from_pretrained(..., output_loading_info=True)`; otherwise None.
_LISTED: ContextVar[list[str] | None] = ContextVar("veomni_listed_experts", default=None)
_SHOWN = 20
_FIX = (
    "complete the checkpoint, or wrap the call in veomni_hook.checkpoints.allow_incomplete_experts() "
    "if missing experts should be newly initialised"
)


@contextmanager
def allow_incomplete_experts() -> Iterator[None]:
    """Disable these checks in this block, thread or task; only transformers' own warnings remain."""
    token = _ALLOWED.set(True)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def give_list(output_loading_info: object) -> None:
    """Record, right before `from_pretrained` loads, whether its caller gets the list of missing tensors."""
    _LISTED.set([] if output_loading_info else None)


def before_loading(state_dict: Iterable[str], model: object) -> None:
    """Run `check_names`; if the caller gets the list, keep the missing tensors for it."""
    listed = _LISTED.get()
    if listed is None:
        check_names(state_dict, model)
    elif not _ALLOWED.get():
        listed += _gaps(state_dict, model)


def after_loading(model: object, loading_info: object) -> None:
    """Run `check_loaded`; if the caller gets the list, add the missing experts to it."""
    listed = _LISTED.get()
    _LISTED.set(None)
    if listed is None:
        check_loaded(model, loading_info)
    else:
        _field(loading_info, "missing_keys").update(listed)


def check_names(names: Iterable[str], model: object = None) -> None:
    """Raise unless the single experts of every module and projection are numbered from 0 without gaps.

    Names that ``model`` ignores when it loads (``_keys_to_ignore_on_load_unexpected``) are skipped, and so
    are all tensors that do not belong to single experts.

    Raises:
        CheckpointError: an expert is missing.
    """
    missing = [] if _ALLOWED.get() else _gaps(names, model)
    if missing:
        raise _error(model, [f"{name} is missing" for name in missing], missing)


def check_loaded(model: PreTrainedModel, loading_info: object) -> None:
    """Raise if expert tensors were missing, had another shape, or were left over.

    ``loading_info`` is what ``from_pretrained(..., output_loading_info=True)`` returns with the model. A
    left-over tensor counts only if the model has its layer: layers removed by the config, and parts of a
    larger model, are ignored.

    Raises:
        CheckpointError: ``tensors`` names them.
    """
    if _ALLOWED.get():
        return
    missing, mismatched, unexpected = (
        _field(loading_info, key) for key in ("missing_keys", "mismatched_keys", "unexpected_keys")
    )
    modules = dict(model.named_modules())
    lines = {name: f"{name} is missing" for name in missing if _of_experts(name, modules)}
    for name, *shapes in mismatched:
        if _of_experts(name, modules):
            lines[name] = f"{name} has the shape {' where the model has '.join(str(list(s)) for s in shapes)}"
    prefix = getattr(model, "base_model_prefix", "")
    for name in unexpected:
        if "experts" in name.split(".") and _layer_exists(name, modules, prefix):
            lines.setdefault(name, f"{name} is unexpected")
    if lines:
        raise _error(model, [lines[name] for name in sorted(lines)], sorted(lines))


def _gaps(names: Iterable[str], model: object) -> list[str]:
    """Missing projections of single experts with numbers below the highest one in their module."""
    ignored = [
        re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    by_module: dict[str, dict[str, set[int]]] = {}
    for name in names:
        module, _, rest = f".{name}".partition(".experts.")
        expert, _, projection = rest.partition(".")
        if expert.isdecimal() and projection and not any(pattern.search(name) for pattern in ignored):
            of_module = by_module.setdefault(f"{module}.experts"[1:], {})
            of_module.setdefault(projection.partition(".")[0], set()).add(int(expert))
    return [
        f"{module}.{expert}.{projection}"
        for module, projections in by_module.items()
        for projection, experts in projections.items()
        for expert in range(1 + max(max(projection) for projection in projections.values()))
        if expert not in experts
    ]


def _field(loading_info: object, key: str) -> Any:
    return loading_info[key] if isinstance(loading_info, dict) else getattr(loading_info, key)


def _of_experts(name: str, modules: dict[str, object]) -> bool:
    """Whether a parameter is in ``experts``, or belongs to a module of a class ``…Experts``."""
    owner = modules.get(name.rpartition(".")[0])
    return "experts" in name.split(".") or type(owner).__name__.endswith("Experts")


def _layer_exists(name: str, modules: dict[str, object], prefix: str) -> bool:
    """Whether the model has the layer of an expert tensor, with or without the base model's prefix."""
    parts = name.split(".")
    above = parts[: parts.index("experts")]
    while above and not above[-1].isdigit():
        above.pop()
    layer = ".".join(above or parts[: parts.index("experts")])
    return any(
        candidate in modules for candidate in (layer, layer.removeprefix(f"{prefix}."), f"{prefix}.{layer}")
    )


def _error(model: object, lines: list[str], tensors: list[str]) -> CheckpointError:
    shown = lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]
    return CheckpointError(
        "the checkpoint's experts are not the model's:\n    " + "\n    ".join(shown),
        where="a checkpoint" if model is None else f"a checkpoint loaded into {type(model).__name__}",
        fix=_FIX,
        tensors=tensors,
    )
