"""Whether `from_pretrained` left experts at their random initialisation; it only warns, this raises.

The patched `transformers.modeling_utils` calls `give_list`, `before_loading` and `after_loading`, which
`veomni_hook.patches.idioms.expert_checkpoints` puts there; they run both checks, or add to the list of
missing tensors where the caller asked for that list.

* `check_names` before anything is loaded. transformers stacks single experts in the order of their numbers
  and never looks at the numbers: with expert 3 missing and one too many at the end, every expert from 3 on is
  another one, and nothing is reported.
* `check_loaded` at the end, on what transformers reports as missing, mismatched and unexpected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from veomni_hook.errors import CheckpointError

__all__ = [
    "after_loading",
    "allow_incomplete_experts",
    "before_loading",
    "check_loaded",
    "check_names",
    "give_list",
]

_ALLOWED: ContextVar[bool] = ContextVar("veomni_incomplete_experts", default=False)
#: In a `from_pretrained(..., output_loading_info=True)` the missing experts found so far; else None.
_LISTED: ContextVar[list[str] | None] = ContextVar("veomni_listed_experts", default=None)
_SHOWN = 20
_FIX = (
    "complete the checkpoint, or wrap the call in veomni_hook.checkpoints.allow_incomplete_experts() "
    "if experts are meant to be initialised anew"
)


@contextmanager
def allow_incomplete_experts() -> Iterator[None]:
    """Leave expert tensors to transformers' own warnings in this block, in this thread or task."""
    token = _ALLOWED.set(True)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def give_list(output_loading_info: object) -> None:
    """Note, right before `from_pretrained` loads, whether its caller gets the list of missing tensors."""
    _LISTED.set([] if output_loading_info else None)


def before_loading(state_dict: Iterable[str], model: Any) -> None:
    """`check_names`; where the caller gets the list, what is missing is kept for it."""
    listed = _LISTED.get()
    if listed is None:
        check_names(state_dict, model)
    elif not _ALLOWED.get():
        listed += _gaps(state_dict, model)


def after_loading(model: Any, loading_info: Any) -> None:
    """`check_loaded`; where the caller gets the list, the experts that it lacks are added to it."""
    listed = _LISTED.get()
    _LISTED.set(None)
    if listed is None:
        check_loaded(model, loading_info)
    else:
        _field(loading_info, "missing_keys").update(listed)


def check_names(names: Iterable[str], model: Any = None) -> None:
    """Raise unless every module's single experts are numbered from 0 without a gap, in each projection alike.

    Names that ``model`` ignores when it loads (``_keys_to_ignore_on_load_unexpected``) are left out. What is
    not of single experts is not looked at.

    Raises:
        CheckpointError: an expert is missing.
    """
    missing = [] if _ALLOWED.get() else _gaps(names, model)
    if missing:
        raise _error(model, [f"{name} is missing" for name in missing], missing)


def check_loaded(model: Any, loading_info: Any) -> None:
    """Raise if expert tensors were missing, of another shape, or left over.

    ``loading_info`` is what ``from_pretrained(..., output_loading_info=True)`` returns with the model. A
    left-over tensor counts if it is in a layer that the model has: layers that a config cut off, and parts of
    a larger model, are no loss here.

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


def _gaps(names: Iterable[str], model: Any) -> list[str]:
    """The projections of single experts that are missing below the highest number in their module."""
    ignored = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    found: dict[str, dict[str, set[int]]] = {}
    for name in names:
        module, _, rest = f".{name}".partition(".experts.")
        expert, _, projection = rest.partition(".")
        if expert.isdecimal() and projection and not any(each.search(name) for each in ignored):
            of_module = found.setdefault(f"{module}.experts"[1:], {})
            of_module.setdefault(projection.partition(".")[0], set()).add(int(expert))
    return [
        f"{module}.{expert}.{projection}"
        for module, projections in found.items()
        for projection, experts in projections.items()
        for expert in range(1 + max(max(each) for each in projections.values()))
        if expert not in experts
    ]


def _field(loading_info: Any, key: str) -> Any:
    return loading_info[key] if isinstance(loading_info, dict) else getattr(loading_info, key)


def _of_experts(name: str, modules: dict[str, Any]) -> bool:
    """Whether a parameter is in ``experts``, or belongs to a module of a class ``…Experts``."""
    owner = modules.get(name.rpartition(".")[0])
    return "experts" in name.split(".") or type(owner).__name__.endswith("Experts")


def _layer_exists(name: str, modules: dict[str, Any], prefix: str) -> bool:
    """Whether the model has the layer that an expert tensor names, with or without the base's prefix."""
    parts = name.split(".")
    above = parts[: parts.index("experts")]
    while above and not above[-1].isdigit():
        above.pop()
    layer = ".".join(above or parts[: parts.index("experts")])
    return any(each in modules for each in (layer, layer.removeprefix(f"{prefix}."), f"{prefix}.{layer}"))


def _error(model: Any, lines: list[str], tensors: list[str]) -> CheckpointError:
    shown = lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]
    return CheckpointError(
        "the checkpoint's experts are not the model's:\n    " + "\n    ".join(shown),
        where="a checkpoint" if model is None else f"a checkpoint loaded into {type(model).__name__}",
        fix=_FIX,
        tensors=tensors,
    )
