"""Changing the classes of a loaded model's modules to their patched forms."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from veomni_hook.adoption.classes import former_class, subclass_for
from veomni_hook.adoption.forms import Form, Unchanged, form_of, is_in_question
from veomni_hook.adoption.report import Adoption
from veomni_hook.errors import AdoptionError
from veomni_hook.finders.state import STATE
from veomni_hook.kernels.explain.places import places_of
from veomni_hook.kernels.shared.origin import name_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["adopt"]

_HERE = "veomni_hook.adopt"


def adopt(model: nn.Module) -> Adoption:
    """Patch a model that was created before the hook could patch its modeling module.

    Each module whose code patches change gets a new class: a subclass of its class, with the same name and
    the changed methods; so do linear layers with the setting ``precision``. Nothing else changes: parameters,
    buffers, hooks, state dict keys and `isinstance` stay the same, and so do other models and the modeling
    module's own classes. Modules that are already patched or adopted are skipped.

    Call it before the model is wrapped or sharded (``fully_shard``, ``accelerator.prepare``). If a wrapper
    (DDP, PEFT, ``torch.compile``) contains the model, the inner model is adopted.

    Args:
        model: any ``nn.Module``; all of its modules are considered.

    Returns:
        What was adopted, what was not and why. `Adoption.undo` reverts it.

    Raises:
        AdoptionError: the hook is not active, or no module of the model was adopted now or patched before.
            Under ``VEOMNI_HOOK=0`` this is not an error: the report is empty.
        PatchError: a patch that was declared for one of its modeling modules does not apply.
    """
    if not callable(getattr(model, "named_modules", None)):
        raise AdoptionError(
            f"a {type(model).__name__} has no modules", where=_HERE, fix="pass a model (an nn.Module)"
        )
    name = type(model).__name__
    if not STATE.handles:
        switch = os.environ.get("VEOMNI_HOOK", "")
        if switch.lower() in ("0", "false", "no", "off"):
            return Adoption(name, off=f"VEOMNI_HOOK={switch}")
        raise AdoptionError(
            f"a {name} cannot be adopted while the hook is off",
            where=_HERE,
            fix="run `import veomni_hook.install` or `veomni_hook.activate()` first",
        )
    survey = _Survey(model)
    report = survey.apply(Adoption(name))
    if not (report.adopted or report.before):
        raise survey.nothing(report)
    report.multiply(model)
    return report


class _Survey:
    """The plans for the classes of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._plans: dict[type, _Plan] = {}
        self._forms: dict[str, Form | Unchanged] = {}

    def apply(self, report: Adoption) -> Adoption:
        """Change the classes, and record the result for each module."""
        for place, module in list(self._model.named_modules()):
            kind = type(module)
            if kind not in self._plans:
                self._plans[kind] = self._plan(kind)
            plan = self._plans[kind]
            if plan.before:
                report.note(report.before, kind, place, plan.before)
                continue
            if plan.made is None and not plan.reason:
                continue  # patches do not change it
            reason = plan.reason
            if not reason and (own := sorted(plan.members & vars(module).keys())):
                standing = name_of(vars(module)[own[0]])
                reason = f"it has its own {own[0]} ({standing}), which would hide the patched one"
            if not reason and plan.made is not None:
                reason = report.rebind(module, plan.made, place, plan.routed)
                homes = {base.__module__ for base in kind.__mro__} if not reason else set()
                STATE.adopted |= {name for name in homes if isinstance(self._forms.get(name), Form)}
            if reason:
                report.note(report.refused, kind, place, reason)
        report.shared = {
            name: form.shared for name, form in self._forms.items() if isinstance(form, Form) and form.shared
        }
        return report

    def nothing(self, report: Adoption) -> AdoptionError:
        """Return the error for a model without any patched module."""
        name = type(self._model).__name__
        if report.refused:
            reasons = "; ".join(
                f"{refusal.kind} ({refusal.first}): {refusal.reason}" for refusal in report.refused
            )
            return AdoptionError(
                f"no module of this {name} could be adopted. {reasons}",
                where=_HERE,
                fix="adopt the model right after it is created, before other libraries change or wrap it",
            )
        if not self._forms:
            what = "no class in it is from a modeling file of transformers"
            fix = "pass the model itself, a transformers model"
        else:
            what = f"no patch applies to {', '.join(self._forms)}"
            fix = "see `veomni-hook list FAMILY` for what is routed, `veomni-hook doctor` for the settings"
        return AdoptionError(f"no module of this {name} could be adopted: {what}", where=_HERE, fix=fix)

    def _plan(self, kind: type) -> _Plan:
        if former_class(kind) is not None:
            return _Plan(before="adopted before")
        forms: dict[type, Form] = {}
        for base in kind.__mro__:
            if not is_in_question(base.__module__):
                continue
            form = self._forms.get(base.__module__)
            if form is None:
                form = self._forms[base.__module__] = form_of(base.__module__)
            if isinstance(form, Form):
                forms[base] = form
            elif form.patched:
                if places_of(kind):
                    return _Plan(before="patched when its module was imported")
            elif form.reason:
                return _Plan(reason=form.reason)
        return _from_forms(kind, forms)


class _Plan:
    """What happens to the modules of one class.

    Attributes:
        made: their new class, or None.
        members: the names of the changed members.
        reason: why they get no new class; empty if they do, or if patches do not change them.
        before: why they need none: they are patched already.
        routed: the formulas for which `made` asks kernels, as ``op/variant``.
    """

    def __init__(
        self,
        subclass: type | None = None,
        *,
        members: frozenset[str] = frozenset(),
        reason: str = "",
        before: str = "",
    ) -> None:
        self.made = subclass
        self.members = members
        self.reason = reason
        self.before = before
        places = () if subclass is None else places_of(subclass)
        self.routed = tuple(dict.fromkeys(f"{place.slot.op}/{place.slot.variant}" for place in places))


def _from_forms(kind: type, forms: dict[type, Form]) -> _Plan:
    """Return the plan for a class that has, or some of whose bases have, changed forms."""
    for base, form in forms.items():
        if reason := form.refusal(base):
            return _Plan(reason=reason)
    changed = {base: form for base, form in forms.items() if base in form.classes}
    if not changed:
        return _Plan()
    members = frozenset(name for base, form in changed.items() for name in form.members[base.__qualname__])
    if kind in changed:
        return _Plan(changed[kind].classes[kind], members=members)
    if library := _library_of(kind):
        return _Plan(
            reason=f"its class was made by {library} while the program ran: adopt the model before that"
        )
    try:
        subclass = subclass_for(kind, [form.classes[base] for base, form in changed.items()])
    except TypeError as error:
        return _Plan(reason=f"no subclass of its class can be made: {error}")
    return _Plan(subclass, members=members)


def _library_of(kind: type) -> str:
    """Return the module that created a class at run time (FSDP2, parametrizations do); empty if none did."""
    home: object = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        if part == "<locals>":
            return ""
        home = getattr(home, part, None)
    # A class that was redefined, e.g. by a notebook cell, still has a definition.
    return "" if home is not None or kind.__module__ == "__main__" else kind.__module__
