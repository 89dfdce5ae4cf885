"""Checks that the functions and methods whose calls a kernel skips are still the recognised ones.

An idiom recognises text, but users replace what the text defines: on a module, on a class, in a subclass, on
an instance, in the modeling file itself. So every call compares the current function with the code object
that Python compiled from the recognised definition. ``__module__`` and ``__qualname__`` are not sufficient,
because `functools.wraps` copies them; nor is the function, because its ``__code__`` can be replaced.

`veomni_hook.kernels.slot.comparison` makes these comparisons. Dynamo traces another form of them and guards
on it, so compiled code detects replacements, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import CodeType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from veomni_hook.kernels.slot.asking import Text
from veomni_hook.kernels.slot.comparison import (
    MISSING,
    Checks,
    Same,
    definition,
    difference,
    hub_wrapped_code,
    layers,
    same_expression,
)

__all__ = ["Recognised", "Skipped", "making_slots_of"]


class Recognised(NamedTuple):
    """The recognised definitions of a module that was imported unpatched, for slots that it gets later.

    Attributes:
        module: the module, which still has upstream's functions and classes.
        homes: a module whose attributes are the classes that now compute the model's modules.
        code_of: returns the code of a recognised definition by its qualified name; None: it was replaced.
        codes: the code of these classes, with the guards.
    """

    module: ModuleType
    homes: ModuleType
    code_of: Callable[[str], CodeType | None]
    codes: tuple[CodeType, ...] = ()


_RECOGNISED: ContextVar[Recognised | None] = ContextVar("veomni_hook_recognised", default=None)


@contextmanager
def making_slots_of(recognised: Recognised) -> Iterator[None]:
    """Make new slots of this module compare with ``recognised`` instead of their frame, in this context."""
    token = _RECOGNISED.set(recognised)
    try:
        yield
    finally:
        _RECOGNISED.reset(token)


class Skipped:
    """The definitions of a module that the kernels of one slot skip.

    Attributes:
        text: the patched text, whose guards may ask; None if anybody may.

    Args:
        skips: by the method that asks (``Class.method``), or by the function whose calls the slot wraps: the
            other definitions of the module that a kernel computes without calling them.
        module_name: the module's name.
        frame: the frame that executes the module's code. In any other frame the recognised code is unknown,
            and skipped definitions count as replaced.
    """

    def __init__(self, skips: Mapping[str, Iterable[str]], module_name: str, frame: FrameType) -> None:
        own = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == module_name
        self._module_name = module_name
        self._skips = {place: tuple(names) for place, names in skips.items()}
        self._scope: Mapping[str, Any] = frame.f_globals if own else {}
        self._module = sys.modules.get(module_name) if own else None
        #: Where classes are looked up by name.
        self._homes, self._kinds = self._module, self._scope
        self._code_of: Callable[[str], CodeType | None] = partial(
            definition, frame.f_code if own and skips else None
        )
        self.text = Text.of(frame, module_name)
        recognised = _RECOGNISED.get()
        if recognised is not None and recognised.module.__name__ == module_name:
            self._module, self._scope = recognised.module, vars(recognised.module)
            self._homes, self._kinds = recognised.homes, vars(recognised.homes)
            self._code_of = recognised.code_of
            self.text = Text((frame.f_code, *recognised.codes), self._scope)
        #: The code to compare under ``torch.compile``, as attributes: dynamo reads a dict once for a graph.
        self._held = SimpleNamespace()
        self._named: dict[type, tuple[tuple[str, str, str], ...]] = {}
        self._by_class: dict[type, Checks] = {}
        #: By class, the expression that is true if nothing differs, as `changed` has made it.
        self.same: dict[type, Same] = {}
        self._by_function = tuple(
            (self._code_of(place), Checks(functions=tuple((name, self._code_of(name)) for name in names)))
            for place, names in self._skips.items()
            if "." not in place
        )
        self._same_functions = tuple(
            (code, same_expression(checks, self._scope, self._kinds, ()))
            for code, checks in self._by_function
        )
        #: By class, the methods that the decorators below `Slot.reached` may call.
        self._reached: dict[type, dict[str, CodeType]] = {}
        #: Whether methods skip anything, so that `changed` must be called.
        self.by_methods = any("." in place for place in self._skips)

    def changed(self, owner: Any, operands: tuple[Any, ...]) -> str | None:
        """Return which definition skipped by a call of the module ``owner`` was replaced, or None."""
        same = self.same.get(type(owner))
        if same is None:
            same = same_expression(self.checks_of(type(owner)), self._scope, self._kinds, operands)
            self.same[type(owner)] = same
        try:
            if same(owner, operands):
                return None
        except (AttributeError, KeyError):
            pass  # the replacement has no code
        return difference(self._by_class[type(owner)], self._scope, self._kinds, owner, operands)

    def named(self, kind: type) -> tuple[tuple[str, str, str], ...]:
        """Return what `changed_traced` compares for modules of the class ``kind``.

        The first string says where the name is looked up: empty for the asking module, ``.`` for functions of
        the modeling module, else a class name. The last string is the attribute that holds the code.
        """
        if (named := self._named.get(kind)) is not None:
            return named
        checks = self._by_class.get(kind) or self.checks_of(kind)
        compared = [
            *(("", name, code) for name, code in checks.methods),
            *((base.__name__, name, code) for base, name, code in checks.overridden),
            *(
                (".", f"{name}{wrapped}", standing)
                for name, code in checks.functions
                for wrapped, standing in layers(self._scope.get(name), code)
            ),
            *((home, name, code) for home, name, code in checks.operands),
        ]
        places = [f"code_{len(self._named)}_{number}" for number in range(len(compared))]
        for place, (_, _, code) in zip(places, compared, strict=True):
            setattr(self._held, place, code)
        named = tuple((where, name, place) for place, (where, name, _) in zip(places, compared, strict=True))
        self._named[kind] = named
        return named

    def changed_traced(
        self, named: tuple[tuple[str, str, str], ...], owner: Any, operands: tuple[Any, ...]
    ) -> bool:
        """Do the same as `changed`, in a form that dynamo can trace; ``named`` is a constant to it."""
        for where, name, expected in named:
            holder: Any = owner if where == "" else self._module
            if where not in ("", "."):
                holder = getattr(self._homes, where, None)
                for operand in operands:
                    if type(operand) is holder and name in operand.__dict__:
                        return True
            code = getattr(self._held, expected)
            for part in name.split("."):
                holder = getattr(holder, part, None)
            if code is None or getattr(holder, "__code__", None) is not code:
                return True
        return False

    def changed_function(self, upstream: Any) -> str | None:
        """Return which definition skipped by a call of the function ``upstream`` was replaced, or None.

        Empty: ``upstream`` itself is not the recognised function.
        """
        try:
            code = upstream.__code__
            for recognised, same in self._same_functions:
                # With other globals it would call other functions.
                if code is recognised and upstream.__globals__ is self._scope and same(None, ()):
                    return None
        except (AttributeError, KeyError):
            pass  # the replacement has no code
        return self._function_differs(upstream)

    def _function_differs(self, upstream: Any) -> str | None:
        code = getattr(upstream, "__code__", MISSING)
        hub = None if code is not MISSING else hub_wrapped_code(upstream)
        for recognised, functions in self._by_function:
            same = code is recognised and upstream.__globals__ is self._scope
            if same or (hub is not None and hub is recognised):
                return difference(functions, self._scope, self._kinds, None, ())
        if not self._by_function and code is not MISSING:
            # A hand-written slot that names no functions.
            written = getattr(upstream, "__globals__", {}).get("__name__")
            return None if written == self._module_name else ""
        return ""

    def changed_function_traced(self, upstream: Any) -> bool:
        """Do the same as `changed_function`, in a form that dynamo can trace."""
        code = getattr(upstream, "__code__", None)
        for recognised, checks in self._by_function:
            if code is not None and code is recognised:
                for name, helper in checks.functions:
                    standing = getattr(getattr(self._module, name, None), "__code__", None)
                    if helper is None or standing is not helper:
                        return True
                return False
        return bool(self._by_function) or upstream.__module__ != self._module_name

    def add_reached(self, decorated: type, ends: type) -> None:
        """Also compare all methods of a class whose decorators are skipped: what these call is unknown.

        Methods of the base class ``ends`` and of its bases are excluded.
        """
        kept = [base for base in reversed(decorated.__mro__) if base not in ends.__mro__]
        methods = {name: attribute for base in kept for name, attribute in vars(base).items()}
        self._reached[decorated] = {
            name: attribute.__code__
            for name, attribute in methods.items()
            if type(attribute) is FunctionType and name != "forward" and not name.startswith("__")
        }
        self.by_methods = True

    def checks_of(self, kind: type) -> Checks:
        """Compute, store and return what is compared for modules of the class ``kind``."""
        mro = list(enumerate(kind.__mro__))
        lineage = {
            base.__qualname__: (number, base)
            for number, base in reversed(mro)  # two forms of a class: the first wins
            if base.__module__ == self._module_name
        }
        places = [place for place in self._skips if "." in place]
        # A forward borrowed by another class: everything that it may skip is looked up there.
        places = [place for place in places if place.rpartition(".")[0] in lineage] or places
        names = dict.fromkeys(name for place in places for name in self._skips[place])
        split = [(*name.rpartition(".")[::2], self._code_of(name)) for name in names]
        own = [(*lineage[home], name, code) for home, name, code in split if home in lineage]
        own.sort(key=lambda check: check[0])
        first: dict[str, CodeType | None] = {}
        for base in reversed(kind.__mro__):
            first.update(self._reached.get(base, {}))
        first.update((name, code) for _, _, name, code in reversed(own))
        checks = self._by_class[kind] = Checks(
            methods=tuple(first.items()),
            overridden=tuple((base, n, code) for _, base, n, code in own if first[n] is not code),
            functions=tuple((name, code) for home, name, code in split if not home),
            operands=tuple(check for check in split if check[0] and check[0] not in lineage),
        )
        return checks
