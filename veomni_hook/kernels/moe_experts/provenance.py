"""Tells whether a user chose ``experts_implementation``, or transformers replaced None by its default.

The config's value cannot tell: transformers writes ``"grouped_mm"`` over None, and for the next model made
from the config this looks like a choice. But defaults bypass the property ``_experts_implementation``, while
users' values go through it or through ``set_experts_implementation``. Patched transformers records those two
here (`veomni_hook.patches.idioms.moe_experts.implementation` inserts the calls). The record is stored in the
config itself, survives deep copies and pickling, and is never written to ``config.json``.

The user's choice overrides ``auto``. A kernel that ``VEOMNI_KERNELS`` selects by name overrides both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from veomni_hook.kernels.selection.declaration import EAGER

__all__ = [
    "OURS",
    "chose_ours",
    "forget_choice",
    "note_assignment",
    "note_request",
    "overridden",
    "users_choice",
]

#: The name of this package's kernels in transformers' list.
OURS = "veomni"
_CHOICE = "_veomni_experts_choice"
_KEPT = "_veomni_experts_kept"


def users_choice(owner: Any, *operands: Any) -> str | None:
    """Return why ``auto`` leaves the experts module ``owner`` to transformers, or None without a choice.

    Only an ``owner`` with the ``config`` that ``@use_experts_implementation`` reads can have a choice.
    """
    config = getattr(owner, "config", None)
    if config is None or not hasattr(config, "_experts_implementation") or chose_ours(owner):
        return None
    chosen = vars(config).get(_CHOICE)
    if chosen is not None:
        return f"experts_implementation={chosen!r} was chosen"
    kind: Any = type(config)
    if not _is_watched(kind) and config._experts_implementation is not None:
        return (
            f"experts_implementation={config._experts_implementation!r} may have been chosen: "
            "transformers was imported before veomni_hook, so the choice is unknown"
        )
    return None


def overridden(owner: Any, wanted: str) -> str | None:
    """Return the ``experts_implementation`` that ``wanted``, a backend selected by name, overrides."""
    if chose_ours(owner):
        return f"experts_implementation={OURS!r}"
    chosen = vars(getattr(owner, "config", object)).get(_CHOICE)
    return None if chosen is None or wanted == EAGER else f"experts_implementation={chosen!r}"


def chose_ours(owner: Any) -> bool:
    """Whether transformers' ``experts_implementation`` selects this package's kernels."""
    return getattr(getattr(owner, "config", None), "_experts_implementation", None) == OURS


def note_assignment(config: Any, value: str | Mapping[str, str] | None) -> None:
    """Record that ``config._experts_implementation = value`` will run; it also assigns to sub-configs."""
    if vars(config).pop(_KEPT, False):
        return
    if not isinstance(value, Mapping):
        _note(config, value)
        return
    if "" in value:
        _note(config, value[""])
    for key, part in _sub_configs(config):
        if key not in value:
            # Assigning the current value again is not a choice.
            vars(part)[_KEPT] = True


def note_request(model: Any, requested: str | Mapping[str, str] | None) -> None:
    """Record that ``model.set_experts_implementation(requested)`` has run; called by that method itself.

    A call from transformers' own code is not a choice: generation switches the implementation while decoding
    and restores it, and exporters do the same.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller.partition(".")[0] == "transformers":
        return
    config = model.config
    named = {id(part): key for key, part in _sub_configs(config)}
    for module in model.modules():
        if not hasattr(module, "set_experts_implementation"):
            continue
        key = named.get(id(module.config), "")
        if not isinstance(requested, Mapping):
            _note(module.config, requested)
        elif key in requested:
            _note(module.config, requested[key])


def forget_choice(serialised: dict[str, Any]) -> None:
    """Remove the record from the dict that will be written as ``config.json``."""
    serialised.pop(_CHOICE, None)


def _note(config: Any, value: str | None) -> None:
    if value is None:
        vars(config).pop(_CHOICE, None)
    else:
        vars(config)[_CHOICE] = value


def _sub_configs(config: Any) -> Iterator[tuple[str, Any]]:
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None:
            yield key, part


def _is_watched(config_class: Any) -> bool:
    return _found_watched(config_class)


# Same effect as torch.compiler.assume_constant_result, without importing dynamo: the function is called at
# trace time and its result is a constant. With a cache, dynamo would warn.
setattr(_is_watched, "_dynamo_marked_constant", True)  # noqa: B010 - mypy knows no such attribute


@cache
def _found_watched(config_class: Any) -> bool:
    """Whether this process records assignments to configs of this class, and requests to models."""
    models = sys.modules.get("transformers.modeling_utils")
    request = getattr(getattr(models, "PreTrainedModel", None), "set_experts_implementation", None)
    assignment = getattr(getattr(config_class, "_experts_implementation", None), "fset", None)
    return _calls(assignment, note_assignment.__name__) and _calls(request, note_request.__name__)


def _calls(function: Any, name: str) -> bool:
    return name in getattr(getattr(function, "__code__", None), "co_names", ())
