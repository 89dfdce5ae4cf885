"""Changing the classes of a loaded model's modules to their patched forms."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
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
    report = Adoption(name)
    forms: dict[str, Form | Unchanged] = {}
    _rebind(model, report, forms)
    if not (report.adopted or report.before):
        raise _nothing(report, forms)
    report.multiply(model)
    return report


@dataclass(frozen=True)
class _Plan:
    """What happens to the modules of one class.

    Attributes:
        made: their new class, or None.
        members: the names of the changed members.
        reason: why they get no new class; empty if they do, or if patches do not change them.
        before: why they need none: they are patched already.
        routed: the formulas for which `made` asks kernels, as ``op/variant``.
    """

    made: type | None = None
    members: frozenset[str] = frozenset()
    reason: str = ""
    before: str = ""
    routed: tuple[str, ...] = ()


def _rebind(model: nn.Module, report: Adoption, forms: dict[str, Form | Unchanged]) -> None:
    """Change the classes of a model's modules, and record the result for each; ``forms`` gets the forms."""
    plans: dict[type, _Plan] = {}
    for place, module in list(model.named_modules()):
        kind = type(module)
        if kind not in plans:
            plans[kind] = _plan(kind, forms)
        plan = plans[kind]
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
            STATE.adopted |= {name for name in homes if isinstance(forms.get(name), Form)}
        if reason:
            report.note(report.refused, kind, place, reason)
    report.shared = {
        name: form.shared for name, form in forms.items() if isinstance(form, Form) and form.shared
    }


def _nothing(report: Adoption, forms: Collection[str]) -> AdoptionError:
    """Return the error for a model without any patched module; ``forms``: its modeling modules."""
    if report.refused:
        reasons = "; ".join(
            f"{refusal.kind} ({refusal.first}): {refusal.reason}" for refusal in report.refused
        )
        return AdoptionError(
            f"no module of this {report.model} could be adopted. {reasons}",
            where=_HERE,
            fix="adopt the model right after it is created, before other libraries change or wrap it",
        )
    if not forms:
        what = "no class in it is from a modeling file of transformers"
        fix = "pass the model itself, a transformers model"
    else:
        what = f"no patch applies to {', '.join(forms)}"
        fix = "see `veomni-hook list FAMILY` for what is routed, `veomni-hook doctor` for the settings"
    return AdoptionError(f"no module of this {report.model} could be adopted: {what}", where=_HERE, fix=fix)


def _plan(kind: type, forms: dict[str, Form | Unchanged]) -> _Plan:
    if former_class(kind) is not None:
        return _Plan(before="adopted before")
    changed: dict[type, Form] = {}
    for base in kind.__mro__:
        if not is_in_question(base.__module__):
            continue
        form = forms.get(base.__module__)
        if form is None:
            form = forms[base.__module__] = form_of(base.__module__)
        if isinstance(form, Form):
            changed[base] = form
        elif form.patched:
            if places_of(kind):
                return _Plan(before="patched when its module was imported")
        elif form.reason:
            return _Plan(reason=form.reason)
    return _from_forms(kind, changed)


def _from_forms(kind: type, forms: dict[type, Form]) -> _Plan:
    """Return the plan for a class that has, or some of whose bases have, changed forms."""
    for base, form in forms.items():
        if reason := form.refusal(base):
            return _Plan(reason=reason)
    changed = {base: form for base, form in forms.items() if base in form.classes}
    if not changed:
        return _Plan()
    if kind in changed:
        subclass = changed[kind].classes[kind]
    elif library := _library_of(kind):
        return _Plan(
            reason=f"its class was made by {library} while the program ran: adopt the model before that"
        )
    else:
        try:
            subclass = subclass_for(kind, [form.classes[base] for base, form in changed.items()])
        except TypeError as error:
            return _Plan(reason=f"no subclass of its class can be made: {error}")
    members = frozenset(name for base, form in changed.items() for name in form.members[base.__qualname__])
    routed = dict.fromkeys(f"{place.slot.op}/{place.slot.variant}" for place in places_of(subclass))
    return _Plan(subclass, members, routed=tuple(routed))


def _library_of(kind: type) -> str:
    """Return the module that created a class at run time (FSDP2, parametrizations do); empty if none did."""
    home: object = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        if part == "<locals>":
            return ""
        home = getattr(home, part, None)
    # A class that was redefined, e.g. by a notebook cell, still has a definition.
    return "" if home is not None or kind.__module__ == "__main__" else kind.__module__
