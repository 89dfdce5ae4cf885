"""The patched form of a module that was imported unpatched: its changed classes, next to the originals.

The module is not executed again. A second copy would have its own classes for outputs and layers, so existing
objects would not be instances of them; its functions would not see what users put into the module; and
``torch.compile`` looks up the globals of a function in `sys.modules`. Instead, every changed class becomes a
subclass of the original class, with only the changed members. Their globals are the module's own; the names
that patches add (the slots) are put there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import decode_source
from types import CodeType, ModuleType
from typing import Any

from veomni_hook.adoption import live
from veomni_hook.adoption.classes import with_copies
from veomni_hook.finders.already_imported import is_patched
from veomni_hook.finders.loader import PatchedLoader, virtual_path
from veomni_hook.finders.outcome import NOTHING, Outcome
from veomni_hook.finders.patched_form import patched_form
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import SHARED, is_remote, is_target
from veomni_hook.kernels.shared.origin import name_of
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.slot.comparison import definition
from veomni_hook.kernels.slot.guards import FORM
from veomni_hook.kernels.slot.skipped import Recognised, making_slots_of
from veomni_hook.patches.delta import BASES, ChangedClass, Delta, adopted_name, delta

__all__ = ["Form", "Unchanged", "form_of", "is_in_question"]

#: The only one of the modules shared by all models from which models inherit methods with guards.
_LAYERS = "transformers.modeling_layers"


@dataclass(frozen=True)
class Unchanged:
    """Why a module has no form.

    Attributes:
        reason: why; empty if no patch applies to the module.
        patched: whether the module was imported patched.
    """

    reason: str = ""
    patched: bool = False


@dataclass
class Form:
    """The changed classes of one module.

    Attributes:
        module: the module.
        spec: the spec that the module was executed with.
        outcome: the cache's outcome for the patched form.
        classes: the changed classes, by original class.
        refused: by class name, why the class has no changed form.
        members: by class name, the names of the changed members.
        shared: names besides classes that patches change in the module; adoption does not change them.
        written: the compiled code of the installed, unpatched source.
    """

    module: ModuleType
    spec: ModuleSpec
    outcome: Outcome
    classes: dict[type, type] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    members: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    written: CodeType | None = None

    def refusal(self, kind: type) -> str:
        """Return why modules of a class of this module cannot be adopted now; empty if they can."""
        name = kind.__qualname__
        if name not in self.members or name in self.refused:
            return self.refused.get(name, "")
        if kind not in self.classes:
            return f"its module {self.module.__name__} was executed again after it was made"
        return live.replaced(self.written, self.module, kind, self.members[name])


_FORMS: dict[str, Form] = {}


def is_in_question(name: str) -> bool:
    """Return whether classes of the module ``name`` may be adopted, judging by the name alone."""
    if name in SHARED and name != _LAYERS:
        return False  # their code has already run when a model is loaded
    return is_target(name) or is_remote(name) or STATE.is_registered(name)


def form_of(name: str) -> Form | Unchanged:
    """Return the changed classes of the loaded module ``name``; the same objects at every call.

    Raises:
        PatchError: a patch that was declared for the module does not apply.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None or spec is None:
        return Unchanged(f"its module {name} is not in sys.modules any more")
    if is_patched(module):
        return Unchanged(patched=True)
    if is_remote(name) and not current_settings().remote_code:
        return Unchanged("it is remote code, which is patched only under VEOMNI_REMOTE_CODE=1")
    patched = patched_form(name, spec)
    if isinstance(patched, str):
        return Unchanged("" if patched == NOTHING else patched)
    return _form(module, spec, *patched)


def _form(module: ModuleType, spec: ModuleSpec, loader: PatchedLoader, outcome: Outcome) -> Form | Unchanged:
    if loader.foreign is not None:
        changed = type(loader.foreign).__qualname__
        return Unchanged(f"its module was loaded by {changed}, whose changes to the code adopt cannot repeat")
    known = _FORMS.get(module.__name__)
    if known is None or known.module is not module or known.spec is not spec:
        known = _FORMS[module.__name__] = _Build(Form(module, spec, outcome), loader).form()
    if known.outcome.patch_hash != outcome.patch_hash:
        return Unchanged("models of its module have been adopted with other patches in this process")
    return known


class _Build:
    """Builds the form of one module."""

    def __init__(self, form: Form, loader: PatchedLoader) -> None:
        module = form.module
        installed = SourceFileLoader(module.__name__, loader.upstream)
        self._module = module
        self._text = loader.get_source(loader.name)
        self._upstream = decode_source(installed.get_data(loader.upstream))
        self._written = installed.get_code(module.__name__)
        self._path = virtual_path(module.__name__) if loader.virtual else loader.path
        self._form = form
        form.written = self._written
        # `explain` and the comparison of skipped definitions read the form of the module here.
        self._homes = ModuleType(module.__name__)
        self._homes.__loader__ = loader
        self._homes.__file__ = self._path
        self._codes: dict[str, CodeType] = {}

    def form(self) -> Form:
        changes = delta(self._upstream, self._text)
        self._form.shared = tuple(sorted(changes.shared))
        vars(self._homes).update(
            (name, value)
            for name, value in vars(self._module).items()
            if isinstance(value, type) and value.__module__ == self._module.__name__
        )
        usable = dict(self._usable(changes))
        compiled: dict[type, CodeType] = {}
        for kind, change in usable.items():
            tree = ast.Module([*changes.future, change.node], [])
            compiled[kind] = compile(tree, self._path, "exec", dont_inherit=True)
            self._codes.update(live.definitions(compiled[kind]))
        # The statements that patches add bind new names in the module, for the changed classes.
        tree = ast.Module([*changes.future, *changes.added], [])
        code = compile(ast.fix_missing_locations(tree), self._path, "exec", dont_inherit=True)
        scope = vars(self._module)
        with making_slots_of(Recognised(self._module, self._homes, self._code_of, tuple(compiled.values()))):
            exec(code, scope)
        vars(self._homes).update((name, value) for name, value in scope.items() if isinstance(value, Slot))
        for kind, change in usable.items():
            self._make(kind, change, compiled[kind])
        for name in changes.classes:
            now = vars(self._homes).get(name, vars(self._module).get(name))
            vars(self._module)[adopted_name(name)] = now
        return self._form

    def _usable(self, changes: Delta) -> Iterator[tuple[type, ChangedClass]]:
        for name, change in changes.classes.items():
            kind = vars(self._module).get(name)
            self._form.members[name] = change.members
            if not isinstance(kind, type) or kind.__module__ != self._module.__name__:
                self._form.refused[name] = f"{self._module.__name__}.{name} was replaced by {name_of(kind)}"
            elif change.refused:
                self._form.refused[name] = change.refused
            else:
                yield kind, change

    def _make(self, kind: type, change: ChangedClass, code: CodeType) -> None:
        bases = [kind, *(self._form.classes[base] for base in kind.__mro__ if base in self._form.classes)]
        names: dict[str, Any] = {BASES: tuple(bases)}
        exec(code, vars(self._module), names)
        subclass = names[change.name]
        if not live.set_class_cell(subclass, definition(code, change.name), kind):
            self._form.refused[change.name] = "it calls super() where a decorator hides the call"
            return
        setattr(subclass, FORM, self._homes)
        self._form.classes[kind] = with_copies(subclass, kind)
        setattr(self._homes, change.name, subclass)

    def _code_of(self, place: str) -> CodeType | None:
        """Return the code of a recognised definition: from the changed class, or from the loaded module."""
        if (code := self._codes.get(place)) is not None:
            return code
        home, _, name = place.rpartition(".")
        scope: Mapping[str, Any] = vars(self._module)
        if home:
            kind = scope.get(home)
            scope = vars(kind) if isinstance(kind, type) else {}
        written = definition(self._written, place)
        return None if written is None else live.code_like(written, scope.get(name))
