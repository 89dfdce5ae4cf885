"""The patched form of a module that was imported unpatched: its changed classes, beside the module's own.

The module is not executed again. A second copy of it would have classes of its own for outputs and layers, of
which nothing that is loaded is an instance, and functions that do not see what users put into the module; and
``torch.compile`` looks for the globals of a function in `sys.modules`. So every changed class becomes a
subclass of the class that models are made of, with the changed members alone. Their globals are the module's
own, into which the names that patches add (the slots) are put.
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
from veomni_hook.finders import early, pipeline
from veomni_hook.finders.finder import SHARED, is_remote, is_target
from veomni_hook.finders.handle import current_settings
from veomni_hook.finders.loader import PatchedLoader, virtual_path
from veomni_hook.finders.outcome import Outcome
from veomni_hook.finders.state import STATE
from veomni_hook.kernels.sites import FORM
from veomni_hook.kernels.skipped import Recognised, making_slots_of
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.standing import name_of
from veomni_hook.patches.delta import BASES, ChangedClass, Delta, adopted_name, delta

__all__ = ["Form", "Unchanged", "form_of", "is_in_question"]

#: Of the modules that all models share, the one whose classes models inherit methods with guards from.
_LAYERS = "transformers.modeling_layers"


@dataclass(frozen=True)
class Unchanged:
    """Why a module has no form.

    Attributes:
        reason: empty: no patch applies to it.
        patched: whether it was imported patched.
    """

    reason: str = ""
    patched: bool = False


@dataclass
class Form:
    """The changed classes of one module.

    Attributes:
        module: the module.
        spec: the spec that it was executed with.
        outcome: what the cache told of its patched form.
        classes: the changed classes, by the class that each is the changed form of.
        refused: by the name of a class, why it has none.
        members: by the name of a class, the names of the members that are changed.
        shared: what patches change in the module beside classes, which adoption leaves as it is.
        written: the code that the installed, unpatched text compiles to.
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
        """Return why modules of a class of this module cannot be adopted now; empty: they can."""
        name = kind.__qualname__
        if name not in self.members or name in self.refused:
            return self.refused.get(name, "")
        if kind not in self.classes:
            return f"its module {self.module.__name__} was executed again after it was made"
        return live.replaced(self.written, self.module, kind, self.members[name])


_FORMS: dict[str, Form] = {}


def is_in_question(name: str) -> bool:
    """Whether classes of the module ``name`` may be adopted, as far as the name tells."""
    if name in SHARED and name != _LAYERS:
        return False  # what they do has been done when a model is loaded
    finder = STATE.finder
    return (
        is_target(name)
        or is_remote(name)
        or (finder is not None and name in finder.registered)
        or (finder is not None and any(applies(name) for applies in finder.patterns))
    )


def form_of(name: str) -> Form | Unchanged:
    """Return the changed classes of the loaded module ``name``; the same ones at every call.

    Raises:
        PatchError: a patch that was declared for the module does not apply.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None or spec is None:
        return Unchanged(f"its module {name} is not in sys.modules any more")
    if early.is_patched(module):
        return Unchanged(patched=True)
    if is_remote(name) and not current_settings().remote_code:
        return Unchanged("it is remote code, which VEOMNI_REMOTE_CODE=1 lets be patched")
    found = pipeline.patched_form(name, spec)
    if isinstance(found, str):
        return Unchanged("" if found == pipeline.NOTHING else found)
    return _form(module, spec, *found)


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
    """Makes the form of one module."""

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
        # What explains, and what compares skipped definitions, reads the form of the module here.
        self._homes = ModuleType(module.__name__)
        self._homes.__loader__ = loader
        self._homes.__file__ = self._path
        self._codes: dict[str, CodeType] = {}

    def form(self) -> Form:
        changes = delta(self._upstream, self._text)
        self._form.shared = tuple(sorted(changes.shared))
        vars(self._homes).update(
            (name, each)
            for name, each in vars(self._module).items()
            if isinstance(each, type) and each.__module__ == self._module.__name__
        )
        usable = dict(self._usable(changes))
        compiled = {kind: self._compile(changes, change) for kind, change in usable.items()}
        for code in compiled.values():
            self._codes.update(live.definitions(code))
        self._add(changes)
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

    def _compile(self, changes: Delta, change: ChangedClass) -> CodeType:
        tree = ast.Module([*changes.future, change.node], [])
        return compile(tree, self._path, "exec", dont_inherit=True)

    def _add(self, changes: Delta) -> None:
        """Execute the statements that patches add: they bind new names of the module."""
        tree = ast.Module([*changes.future, *changes.added], [])
        code = compile(ast.fix_missing_locations(tree), self._path, "exec", dont_inherit=True)
        scope = vars(self._module)
        with making_slots_of(Recognised(self._module, self._homes, self._code_of)):
            exec(code, scope)
        vars(self._homes).update((name, each) for name, each in scope.items() if isinstance(each, Slot))

    def _make(self, kind: type, change: ChangedClass, code: CodeType) -> None:
        bases = [kind, *(self._form.classes[base] for base in kind.__mro__ if base in self._form.classes)]
        names: dict[str, Any] = {BASES: tuple(bases)}
        exec(code, vars(self._module), names)
        made = names[change.name]
        if not live.set_class_cell(made, live.definition(code, change.name), kind):
            self._form.refused[change.name] = "it calls super() where a decorator hides the call"
            return
        setattr(made, FORM, self._homes)
        self._form.classes[kind] = with_copies(made, kind)
        setattr(self._homes, change.name, made)

    def _code_of(self, place: str) -> CodeType | None:
        """The code of a recognised definition: the changed one's, or that of what is loaded."""
        if (code := self._codes.get(place)) is not None:
            return code
        written = live.definition(self._written, place)
        return None if written is None else live.code_like(written, self._found(place))

    def _found(self, place: str) -> Any:
        home, _, name = place.rpartition(".")
        scope: Mapping[str, Any] = vars(self._module)
        if home:
            kind = scope.get(home)
            scope = vars(kind) if isinstance(kind, type) else {}
        return scope.get(name)
