"""Whether the code that asks a slot is the text that was patched, or an edited copy of it.

People take `inspect.getsource` of a method, change a line of upstream's, execute the text and assign the
result. The guard above that line still asks, and a kernel would compute past the change. So every call
compares the code that asks, and its globals, with those of the module. A copy that is executed elsewhere,
even unchanged, has globals of its own: which helpers it calls is unknown. It counts as edited.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType, ModuleType
from typing import Any

from veomni_hook.kernels.shared.traced_frame import frames, origin_of
from veomni_hook.kernels.slot.comparison import codes_in

__all__ = ["Text"]

#: Packages whose functions stand between patched code and a slot: they hand a call on.
_BETWEEN = ("torch", __name__.partition(".")[0])
#: Functions that execute a module when it is imported: of loaders, and the one that importlib's own call.
_IMPORTING = ("exec_module", "_call_with_frames_removed")


class Text:
    """The functions of a module as they were patched: only their guards get kernels.

    Args:
        codes: code in whose constants these functions are.
        scope: their globals.
    """

    def __init__(self, codes: Iterable[CodeType], scope: Mapping[str, object]) -> None:
        self._codes = tuple(codes)
        self.scope = scope
        self._known: dict[int, CodeType] = {}

    @classmethod
    def of(cls, frame: FrameType, module_name: str) -> Text | None:
        """Return the text of the module whose code ``frame`` executes.

        None if it executes something else, as a script: a slot that was made by hand, which anybody may ask.
        Of the text of a module that was imported before, nothing is known: it may be an edited copy.
        """
        named = module_name == frame.f_globals.get("__name__") != "__main__"
        if frame.f_code.co_name != "<module>" or not named:
            return None
        module: ModuleType | None = sys.modules.get(module_name)
        above = frame.f_back
        imported = module is None or (
            vars(module) is frame.f_globals and above is not None and above.f_code.co_name in _IMPORTING
        )
        return cls((frame.f_code,) if imported else (), frame.f_globals)

    def edited(self, frame: FrameType) -> str | None:
        """Return why the code that asks through ``frame`` is not of this text, or None."""
        if frame.f_globals is self.scope and id(frame.f_code) in self._known:
            return None
        asking: FrameType | None = frame
        while asking is not None and _is_between(asking.f_globals):
            asking = asking.f_back
        return self._unlike(None if asking is None else (asking.f_code, asking.f_globals))

    def edited_traced(self) -> str | None:
        """Do the same as `edited` for the code that dynamo is tracing."""
        outside = ((code, scope) for code, scope in frames() if not _is_between(scope))
        return self._unlike(next(outside, None))

    def _unlike(self, asking: tuple[CodeType, Mapping[str, Any]] | None) -> str | None:
        if asking is None:
            return "it is unknown which function asks"
        code, scope = asking
        if self.holds(origin_of(code), scope):
            return None
        home = scope.get("__name__", "?")
        return (
            f"the function that asks is an edited copy of the patched code: {home}.{code.co_qualname}"
            f" ({code.co_filename}, line {code.co_firstlineno})"
        )

    def holds(self, code: CodeType, scope: Mapping[str, object]) -> bool:
        """Return whether a function with this code and these globals is of this text."""
        if scope is not self.scope:
            return False
        if not self._known:
            self._known = {id(inner): inner for outer in self._codes for inner in codes_in(outer)}
        if id(code) in self._known:
            return True
        # A module that was executed again has other objects of the same code.
        same = any(known.co_qualname == code.co_qualname and known == code for known in self._known.values())
        if same:
            self._known[id(code)] = code
        return same


def _is_between(scope: Mapping[str, object]) -> bool:
    return str(scope.get("__name__", "")).partition(".")[0] in _BETWEEN
