"""Records which value of a setting such as ``experts_implementation`` a user chose.

The config's value cannot tell: transformers writes its default over None, and for the next model made from
the config this looks like a choice. But defaults bypass the property of the config, while users' values go
through it or through the model's ``set_..._implementation``. Patched transformers records those two
(`veomni_hook.patches.idioms.implementations` inserts the calls). The record is stored in the config itself,
survives deep copies and pickling, and is never written to ``config.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from veomni_hook.kernels.shared.traced_frame import answered_while_tracing

__all__ = ["RecordedChoice", "is_watched"]

Requested = str | Mapping[str, str] | None


class RecordedChoice:
    """The record of one setting: ``experts`` of ``experts_implementation``, ``attn`` of the attention's.

    Attributes:
        key: where a config holds the user's choice, in its ``__dict__``.
    """

    def __init__(self, kind: str) -> None:
        self.key = f"_veomni_{kind}_choice"
        self._kept = f"_veomni_{kind}_kept"
        self._request = f"set_{kind}_implementation"

    def note_assignment(self, config: Any, value: Requested) -> None:
        """Record that ``value`` will be assigned to ``config``'s property, which also sets sub-configs."""
        if vars(config).pop(self._kept, False):
            return
        if not isinstance(value, Mapping):
            self._note(config, value)
            return
        if "" in value:
            self._note(config, value[""])
        for key, part in _sub_configs(config):
            if key not in value:
                # Assigning the current value again is not a choice.
                vars(part)[self._kept] = True

    def note_request(self, model: Any, requested: Requested) -> None:
        """Record that the model's setter has run with ``requested``; called by that method itself.

        A call from transformers' own code is not a choice: generation switches the implementation while
        decoding and restores it, and exporters do the same.
        """
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "transformers":
            return
        config = model.config
        named = {id(part): key for key, part in _sub_configs(config)}
        for module in model.modules():
            if not hasattr(module, self._request):
                continue
            key = named.get(id(module.config), "")
            if not isinstance(requested, Mapping):
                self._note(module.config, requested)
            elif key in requested:
                self._note(module.config, requested[key])

    def forget_choice(self, serialised: dict[str, Any]) -> None:
        """Remove the record from the dict that will be written as ``config.json``."""
        serialised.pop(self.key, None)

    def _note(self, config: Any, value: str | None) -> None:
        if value is None:
            vars(config).pop(self.key, None)
        else:
            vars(config)[self.key] = value


def _sub_configs(config: Any) -> Iterator[tuple[str, Any]]:
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None:
            yield key, part


# Not the function with the cache: of that, dynamo would warn.
@answered_while_tracing
def is_watched(config_class: Any, kind: str) -> bool:
    """Return whether this process records assignments to configs of this class, and requests to models."""
    return _found_watched(config_class, kind)


@cache
def _found_watched(config_class: Any, kind: str) -> bool:
    models = sys.modules.get("transformers.modeling_utils")
    request = getattr(getattr(models, "PreTrainedModel", None), f"set_{kind}_implementation", None)
    assignment = getattr(getattr(config_class, f"_{kind}_implementation", None), "fset", None)
    return _calls(assignment, "note_assignment") and _calls(request, "note_request")


def _calls(function: Any, name: str) -> bool:
    return name in getattr(getattr(function, "__code__", None), "co_names", ())
