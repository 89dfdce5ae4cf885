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
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import decode_source
from types import CodeType, ModuleType
from typing import Any

from veomni_hook.adoption import live
from veomni_hook.adoption.classes import with_copies
from veomni_hook.finders.already_imported import is_patched
from veomni_hook.finders.loader import PatchedLoader
from veomni_hook.finders.outcome import NOTHING, Outcome
from veomni_hook.finders.patched_form import patched_form
from veomni_hook.finders.settings_in_force import current_settings
from veomni_hook.finders.state import STATE
from veomni_hook.finders.targets import SHARED, is_remote, is_target
from veomni_hook.kernels.shared.origin import name_of
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.slot.comparison import codes_in, definition
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
        known = _FORMS[module.__name__] = _built(module, spec, loader, outcome)
    if known.outcome.patch_hash != outcome.patch_hash:
        return Unchanged("models of its module have been adopted with other patches in this process")
    return known


def _built(module: ModuleType, spec: ModuleSpec, loader: PatchedLoader, outcome: Outcome) -> Form:
    """Return the form of one module, whose changed classes and new slots have the module's own globals."""
    installed = SourceFileLoader(module.__name__, loader.upstream)
    form = Form(module, spec, outcome, written=installed.get_code(module.__name__))
    changes = delta(decode_source(installed.get_data(loader.upstream)), loader.get_source(loader.name))
    form.shared = tuple(sorted(changes.shared))
    scope = vars(module)
    # `explain` and the comparison of skipped definitions read the form of the module here.
    homes = ModuleType(module.__name__)
    homes.__loader__ = loader
    homes.__file__ = loader.filename
    vars(homes).update(
        (name, value)
        for name, value in scope.items()
        if isinstance(value, type) and value.__module__ == module.__name__
    )

    def compiled(*statements: ast.stmt) -> CodeType:
        tree = ast.fix_missing_locations(ast.Module([*changes.future, *statements], []))
        return compile(tree, loader.filename, "exec", dont_inherit=True)

    usable = dict(_usable(form, changes))
    bodies = {kind: compiled(change.node) for kind, change in usable.items()}
    codes = {code.co_qualname: code for body in bodies.values() for code in codes_in(body)}
    recognised = Recognised(module, homes, partial(_code_of, form, codes), tuple(bodies.values()))
    with making_slots_of(recognised):
        # The statements that patches add bind new names in the module, for the changed classes.
        exec(compiled(*changes.added), scope)
    vars(homes).update((name, value) for name, value in scope.items() if isinstance(value, Slot))
    for kind, change in usable.items():
        _add_class(form, homes, kind, change, bodies[kind])
    for name in changes.classes:
        scope[adopted_name(name)] = vars(homes).get(name, scope.get(name))
    return form


def _usable(form: Form, changes: Delta) -> Iterator[tuple[type, ChangedClass]]:
    """Yield the classes of the module that can have a changed form; note the members of all, and refusals."""
    module = form.module
    for name, change in changes.classes.items():
        kind = vars(module).get(name)
        form.members[name] = change.members
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            form.refused[name] = f"{module.__name__}.{name} was replaced by {name_of(kind)}"
        elif change.refused:
            form.refused[name] = change.refused
        else:
            yield kind, change


def _add_class(form: Form, homes: ModuleType, kind: type, change: ChangedClass, body: CodeType) -> None:
    bases = [kind, *(form.classes[base] for base in kind.__mro__ if base in form.classes)]
    names: dict[str, Any] = {BASES: tuple(bases)}
    exec(body, vars(form.module), names)
    subclass = names[change.name]
    if not live.set_class_cell(subclass, definition(body, change.name), kind):
        form.refused[change.name] = "it calls super() where a decorator hides the call"
        return
    setattr(subclass, FORM, homes)
    form.classes[kind] = with_copies(subclass, kind)
    setattr(homes, change.name, subclass)


def _code_of(form: Form, codes: Mapping[str, CodeType], place: str) -> CodeType | None:
    """Return the code of a recognised definition: from the changed class, or from the loaded module."""
    if (code := codes.get(place)) is not None:
        return code
    home, _, name = place.rpartition(".")
    scope: Mapping[str, Any] = vars(form.module)
    if home:
        kind = scope.get(home)
        scope = vars(kind) if isinstance(kind, type) else {}
    written = definition(form.written, place)
    return None if written is None else live.code_like(written, scope.get(name))
