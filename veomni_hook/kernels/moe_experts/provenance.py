"""Whether a user chose ``experts_implementation``, or transformers put its default in the place of None.

A config cannot tell: transformers writes ``"grouped_mm"`` into it where None was, and the next model that is
made from it looks like a choice. But it writes defaults past the property ``_experts_implementation``, and
users' values through it or through ``set_experts_implementation``. So patched transformers notes those two
here (`veomni_hook.patches.idioms.experts_implementation` puts the calls there), in the config itself, where
the note survives deep copies and pickling; it never gets into ``config.json``.

What the user chose wins over ``auto``. A kernel that ``VEOMNI_KERNELS`` asks for by name wins over both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from veomni_hook.kernels.registry import EAGER

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
    """Return why ``auto`` leaves the experts module ``owner`` to transformers, or None if nobody chose.

    ``owner`` has a choice to honour only if it has the ``config`` that ``@use_experts_implementation`` reads.
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
            "transformers was imported before veomni_hook, which sees no choice"
        )
    return None


def overridden(owner: Any, wanted: str) -> str | None:
    """Return the ``experts_implementation`` that the backend ``wanted``, chosen by name, overrides."""
    if chose_ours(owner):
        return f"experts_implementation={OURS!r}"
    chosen = vars(getattr(owner, "config", object)).get(_CHOICE)
    return None if chosen is None or wanted == EAGER else f"experts_implementation={chosen!r}"


def chose_ours(owner: Any) -> bool:
    """Whether this package's kernels were chosen by transformers' ``experts_implementation``."""
    return getattr(getattr(owner, "config", None), "_experts_implementation", None) == OURS


def note_assignment(config: Any, value: str | Mapping[str, str] | None) -> None:
    """Note that ``config._experts_implementation = value`` is about to run; it assigns to sub-configs too."""
    if vars(config).pop(_KEPT, False):
        return
    if not isinstance(value, Mapping):
        _note(config, value)
        return
    if "" in value:
        _note(config, value[""])
    for key, part in _sub_configs(config):
        if key not in value:
            # What it has is assigned to it again, which is no choice.
            vars(part)[_KEPT] = True


def note_request(model: Any, requested: str | Mapping[str, str] | None) -> None:
    """Note that ``model.set_experts_implementation(requested)`` has run; to be called by that method itself.

    A call from transformers' own code is no choice: generation takes another implementation while it decodes
    and puts the former back, exporters do the same.
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
    """Take the note out of what is about to be written as ``config.json``."""
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


# What torch.compiler.assume_constant_result does, which imports dynamo: while it traces, this is called and
# its result a constant. Of a cache, dynamo would warn.
setattr(_is_watched, "_dynamo_marked_constant", True)  # noqa: B010 - mypy knows no such attribute


@cache
def _found_watched(config_class: Any) -> bool:
    """Whether assignments to configs of this class, and requests to models, are noted in this process."""
    models = sys.modules.get("transformers.modeling_utils")
    request = getattr(getattr(models, "PreTrainedModel", None), "set_experts_implementation", None)
    assignment = getattr(getattr(config_class, "_experts_implementation", None), "fset", None)
    return _calls(assignment, note_assignment.__name__) and _calls(request, note_request.__name__)


def _calls(function: Any, name: str) -> bool:
    return name in getattr(getattr(function, "__code__", None), "co_names", ())
