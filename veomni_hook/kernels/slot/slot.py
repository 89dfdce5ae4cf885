"""The slot, which patched code asks for a kernel.

A slot is a global of the patched module and belongs to one op and variant. Guards call `Slot.kernel`, call
sites of functions call `Slot.at`, those of modules `Slot.call`; `Slot.reached` decorates a class whose guard
is below a decorator.

A slot holds no references to a model: outcomes are stored outside the modules (weakly), so pickling, copying
and state dicts are unchanged. A module's binding (`veomni_hook.kernels.selection.binding`) overrides the
choice of the process. Under ``torch.compile`` only traceable kernels answer
(`veomni_hook.kernels.slot.compiled`), and under ``auto`` only those that beat Inductor. Under
``torch.export`` none does: the upstream code is exported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import CodeType, FrameType, FunctionType
from typing import Any, cast

from veomni_hook.kernels.selection.binding import BINDING
from veomni_hook.kernels.selection.choice import Choice
from veomni_hook.kernels.selection.declaration import EAGER
from veomni_hook.kernels.selection.process_choice import STATE
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.kernels.shared.origin import name_of
from veomni_hook.kernels.shared.traced_frame import answered_while_tracing
from veomni_hook.kernels.slot.arguments import binder, operand_names
from veomni_hook.kernels.slot.asking import Text
from veomni_hook.kernels.slot.candidates import REPLACED, Answers, Outcome, Site
from veomni_hook.kernels.slot.compiled import Compiled, device_of
from veomni_hook.kernels.slot.reached import ModuleClass, NoKernelError, Taking, reach
from veomni_hook.kernels.slot.record import Records
from veomni_hook.kernels.slot.skipped import Skipped

__all__ = ["Slot"]

# Bound here, because every guard uses it.
_frame = sys._getframe
_UPSTREAM = Outcome(EAGER, "no kernel can run here")
_INACTIVE = Outcome(EAGER, "veomni_hook is deactivated")

#: What computes a call (None: the upstream code), and the outcome to record (None: nothing was asked).
_Decision = tuple[Callable[..., Any] | None, Outcome | None]
_UNASKED: _Decision = (None, None)


class Slot:
    """The place in a patched module where a kernel of ``op``/``variant`` may take over.

    ``parameters`` are the parameters of the upstream function whose calls `at` wraps, in the form that
    `veomni_hook.kernels.slot.arguments` describes; empty: they are the op's operands. ``skips`` are the
    definitions of the module whose calls kernels skip (`veomni_hook.kernels.slot.skipped`). The slot must be
    created in the module's own frame, because it compares them with the code that this frame runs.
    """

    def __init__(
        self,
        op: str,
        variant: str,
        module_name: str,
        parameters: str = "",
        skips: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        # Patched modules have already imported torch; other importers of this module need not.
        from torch import compiler, device, is_grad_enabled

        from veomni_hook.kernels.shared import function_modes, repeated

        registry.check(op, variant)
        self.op = op
        self.variant = variant
        self.module_name = module_name
        self.parameters = parameters
        self.skips = dict(skips or {})
        self._skipped = Skipped(self.skips, module_name, sys._getframe(1))
        # `is_compiling` takes two calls. Dynamo knows this function; tracers that run the code set a flag.
        self._is_dynamo = compiler.is_dynamo_compiling
        self._compiler = compiler
        self._device_kind = device
        self._modes, self._intercepting = function_modes.active, function_modes.intercepting
        self._hooks_in_force, self._decided = repeated.hooks_in_force, repeated.decided
        #: The code that asked last, if it is the patched text's, and the globals of that text.
        self._asker: CodeType | None = None
        self._scope = None if self._skipped.text is None else self._skipped.text.scope
        self.site = Site(op, variant, module_name, set())
        self._epoch = -1
        self._version = -1
        #: For modules without a binding.
        self._answers: Answers
        #: By the choice, the reason why the upstream code runs, and whether rows must be batch-invariant.
        self._known: dict[tuple[str, str, bool], Answers] = {}
        self._bound: dict[str, Answers] = {}
        self._bind: Callable[..., tuple[Any, ...]] | None = None
        declared = registry.op(op).variants[variant]
        asks = None if declared.asks is None else load_attribute(declared.asks)
        self._settles = None if declared.settles is None else load_attribute(declared.settles)
        self._compiled = Compiled(op, self._answers_by, self._binder, self._skipped, asks, self._settles)
        self._recorded = is_grad_enabled
        #: The calls of the modules that have asked.
        self.records = Records(module_name, repeated.in_first_pass)
        self._note = self.records.note
        # Per thread: the module whose call came through `reached` and whose guard has not been asked yet.
        self._waiting: threading.local | None = None
        #: What decides about every call after the kernels: it gets this slot, the module, what would run
        #: (None: the upstream code) and the operands, and returns what runs. For ops whose calls are seen.
        self.around: Callable[..., Callable[..., Any] | None] | None = None
        #: Of gated products, for guards in towers: calls both projections with the same input.
        self.projected: Callable[..., tuple[Any, Any]]
        #: Under ``torch.compile``, a call of ``around`` is not traced: it breaks the graph.
        self.apart: Callable[..., Any]

        def set_apart() -> bool:
            disable: Any = compiler.disable
            self.apart = disable(self._run_apart)
            return True

        self._set_apart = answered_while_tracing(set_apart)
        self.prepare()
        if STATE.created is not None:
            STATE.created()

    def prepare(self) -> None:
        """Call what the op declares as ``prepares``, again if something was imported since."""
        if (prepares := registry.op(self.op).prepares) is not None:
            load_attribute(prepares)(self)

    def __repr__(self) -> str:
        parameters = f", parameters={self.parameters!r}" if self.parameters else ""
        skips = f", skips={self.skips!r}" if self.skips else ""
        return f"Slot({self.op!r}, {self.variant!r}, {self.module_name!r}{parameters}{skips})"

    def __reduce__(self) -> tuple[object, ...]:
        # Some tools pickle functions that close over a slot by value; a slot is rebuilt, not copied.
        arguments = (self.op, self.variant, self.module_name, self.parameters, self.skips)
        return (Slot, arguments) if self._skipped.text is None else (_rebuilt, arguments)

    def kernel(self, owner: object, *operands: object) -> Callable[..., Any] | None:
        """Return the function that computes this call, or None: run the upstream code.

        ``owner`` is the module whose ``forward`` asks. Kernels decide by ``operands``; the device of the
        first one (of a list of tensors: of its first tensor) selects the kernels to ask. Raises KernelError
        if a backend chosen by name has no kernel for this variant or cannot run on this machine, or if the
        upstream code would run and cannot give what the caller asks for (`Variant.settles`).
        """
        if self._is_dynamo() or self._compiler._is_compiling_flag:
            return self._traced(owner, operands)
        recorded = self._recorded()
        if recorded and self._hooks_in_force(False) is not None:
            decide = partial(self._decide, owner, operands, _frame(1))
            run, outcome = self._decided((id(self), id(owner)), decide)
        else:
            run, outcome = self._decide(owner, operands, _frame(1))
        if outcome is not None:
            self._note(owner, outcome, recorded)
        if run is None and self._settles is not None:
            left = self.outcome(owner)
            if left is not None and left is not _INACTIVE:
                self._settles(owner, left.reason, *operands)
        if self._waiting is not None and getattr(self._waiting, "owner", None) is owner:
            self._waiting.owner = None
            if run is None:
                raise NoKernelError(self, owner)
        return run if self.around is None else self.around(self, owner, run, operands)

    def fuses(self, owner: object) -> bool:
        """Return whether the copy of the asking method shall run, whose guards ask for kernels.

        ``owner`` is the module whose ``forward`` asks. The copy computes the same, whatever its guards get.
        It does not run if no kernel can be selected, or if the method that asks is an edited one.
        """
        if self._is_dynamo() or self._compiler._is_compiling_flag:
            return not self._exported() and self._compiled.fuses(owner)
        recorded = self._recorded()
        answers = self.answers(owner)
        if answers.idle is not None and not (recorded and self._hooks_in_force(False) is not None):
            return False  # a call that is repeated gets what it got
        text, asking = self._skipped.text, _frame(1)
        if text is not None and (edited := text.edited(asking)) is not None:
            self._note(owner, answers.refused(answers.wanted, edited), recorded)
            return False
        return True

    def replaced(self, owner: object, operands: tuple[object, ...]) -> str | None:
        """Return which definition that kernels of this slot skip was replaced, or None.

        The code that asks is one of them; call this while it waits for the answer.
        """
        edited, skipped = self._edited(_frame(1)), self._skipped
        return edited or (skipped.changed(owner, operands) if skipped.by_methods else None)

    def serves(self, function: FunctionType) -> bool:
        """Return whether the guards of a function get kernels: not of an edited copy of patched code."""
        text = self._skipped.text
        return text is None or text.holds(function.__code__, function.__globals__)

    def call(self, owner: object, module: Callable[..., object], *operands: object) -> Any:
        """Return what a kernel, or else a call of ``module``, makes of ``operands``.

        For calls of modules, or of torch's functions, that are not in the patched file: kernels get
        ``module`` as their last operand, and refuse if it is not what they compute.
        """
        run = self.kernel(owner, *operands, module)
        return module(*operands) if run is None else run(*operands, module)

    def at(self, owner: object, upstream: Callable[..., object]) -> Callable[..., Any]:
        """Return what to call instead of ``upstream``, with exactly the same arguments.

        Returns ``upstream`` itself if no kernel can be selected, or if ``upstream`` or a function that it
        calls is not the recognised one. Else returns a function that asks kernels with the op's operands and,
        last, ``upstream``. The first kernel that accepts is called with the operands. The function falls back
        to ``upstream`` if all refuse, or if the arguments do not fit the parameters.
        """
        if self._is_dynamo() or self._compiler._is_compiling_flag:
            return upstream if self._exported() else self._compiled.at(owner, upstream)
        answers = self.answers(owner)
        if (outcome := answers.idle) is None:
            asking = _frame(1)
            same = asking.f_code is self._asker and asking.f_globals is self._scope
            if not same and (edited := self._edited(asking)) is not None:
                self._note(owner, answers.refused(answers.wanted, edited), self._recorded())
                return upstream
            if (outcome := self._changed(answers, upstream)) is None:
                return partial(self._call, owner, upstream)
        recorded = self._recorded()
        if recorded and self._hooks_in_force(False) is not None:
            return partial(self._call, owner, upstream)  # a call that is repeated gets what it got
        if outcome is not answers.idle:
            self._note(owner, outcome, recorded)
        return upstream

    def reached(self, taking: Taking) -> Callable[[ModuleClass], ModuleClass]:
        """Let calls of a module class reach the guard in its ``forward``, below another decorator.

        Use it above a class decorator that wraps ``forward`` (and sets ``__wrapped__``). A call first goes to
        the wrapped ``forward``, whose first statement is the guard. If the guard finds no kernel, nothing has
        run yet, and the call goes to the wrapper. ``taking`` maps the arguments of a call to the guard's
        operands: under ``torch.compile`` the kernel is selected and called here, because the code after the
        guard must not become part of the graph.
        """
        return partial(reach, self, taking)

    def answers(self, owner: object = None) -> Answers:
        """Return the answers for the module ``owner`` (None: for any module without a binding)."""
        if STATE.epoch != self._epoch or registry.version != self._version:
            self._refresh()
        if owner is None or (bound := owner.__dict__.get(BINDING)) is None or not STATE.active:
            return self._answers
        wanted = bound.get(self.op)
        if wanted is None:
            return self._answers
        return self._bound.get(wanted) or self._bound.setdefault(wanted, self._answers_by(wanted))

    def outcome(self, owner: object) -> Outcome | None:
        """Return what the last call of the module ``owner`` got; None if it has not asked yet.

        While no kernel can be selected, calls are not recorded; the reason for that is returned.
        """
        if (idle := self.answers(owner).idle) is not None:
            return idle
        record = self.records.of(owner)
        return None if record is None else record.latest.last

    def traced(self, owner: object, *, compiled: bool = False) -> Outcome | None:
        """Return what ``torch.compile`` compiled for the calls of the module ``owner``, or None if unknown.

        ``compiled``: the module is known to be compiled, and may run code traced for another of its class.
        """
        return self._compiled.notes.of(owner, self.answers(owner).wanted, compiled=compiled)

    def _run_apart(self, owner: object, *operands: object) -> Any:
        run = self.kernel(owner, *operands)
        if run is None:
            run = load_attribute(registry.op(self.op).variants[self.variant].reference)
        return run(*operands)

    def _exported(self) -> bool:
        """Return whether a program is being exported; it has to run without this package."""
        # In torch 2.11, dynamo always evaluates is_exporting() as true; torch 2.6 does not have it.
        return getattr(self._compiler, "_is_exporting_flag", False)

    def _refresh(self) -> None:
        """Apply the settings in force."""
        epoch, version = STATE.epoch, registry.version
        if version != self._version:
            self._known = {}
        self._bound = {}
        if STATE.active:
            self._answers = self._answers_to(STATE.effective)
        else:
            self._answers = Answers(self.site, Choice(EAGER), _INACTIVE)
        self._epoch, self._version = epoch, version

    def _answers_by(self, wanted: str) -> Answers:
        return self._answers_to(Choice(ops={self.op: wanted}))

    def _answers_to(self, choice: Choice) -> Answers:
        invariant = STATE.choice.invariant
        key = (choice.backend(self.op), choice.why(self.op), invariant)
        answers = self._known.get(key)
        if answers is None:
            answers = self._known[key] = Answers(self.site, replace(choice, invariant=invariant))
        return answers

    def _traced(self, owner: object, operands: tuple[object, ...]) -> Callable[..., Any] | None:
        """Return what `kernel` does while the code is traced."""
        if self.around is not None and self._is_dynamo() and not self._compiled.edited():
            self._set_apart()
            return partial(self.apart, owner)
        if not self._exported():
            return self._compiled.kernel(owner, operands)
        self._compiled.left(owner, "an exported program runs without veomni_hook", operands)
        return None

    def _edited(self, asking: FrameType) -> str | None:
        """Return why the code that asks is not the patched text; None if it is."""
        text = self._skipped.text
        if text is None or asking.f_code is _APART:  # of that, it was asked while it was traced
            return None
        if asking.f_code is _CALL:
            asking = cast("FrameType", asking.f_back)
            if asking.f_code is self._asker and asking.f_globals is self._scope:
                return None
        edited = text.edited(asking)
        if edited is None and asking.f_globals is self._scope:
            self._asker = asking.f_code
        return edited

    # One function, because each call takes time.
    def _decide(  # noqa: C901, PLR0911, PLR0912
        self, owner: Any, operands: tuple[Any, ...], asking: FrameType | None, upstream: Any = None
    ) -> _Decision:
        """Return the decision about a call; ``upstream`` is the function that `at` got."""
        if STATE.epoch != self._epoch or registry.version != self._version:
            self._refresh()
        # `answers`, without a call for modules that are not bound.
        answers = self.answers(owner) if BINDING in owner.__dict__ else self._answers
        if answers.idle is not None:
            return _UNASKED
        if asking is not None and not (asking.f_code is self._asker and asking.f_globals is self._scope):
            if (edited := self._edited(asking)) is not None:
                return None, answers.refused(answers.wanted, edited)
        if upstream is not None and (changed := self._changed(answers, upstream)) is not None:
            return None, changed
        if self._modes() and (intercepting := self._intercepting()) is not None:
            return None, answers.refused(answers.wanted, intercepting)
        skipped = self._skipped
        if skipped.by_methods:
            try:  # what `changed` does first, without a call
                same = skipped.same[type(owner)](owner, operands)
            except (AttributeError, KeyError):
                same = False
            if not same and (differs := skipped.changed(owner, operands)) is not None:
                return None, answers.refused(answers.wanted, differs)
        try:
            # The type of a `torch.device` takes longer than this.
            candidates = answers.on[operands[0].device]
        except (AttributeError, KeyError, TypeError):
            candidates = answers.candidates(device_of(operands))
            if candidates and type(device := getattr(operands[0], "device", None)) is self._device_kind:
                answers.on[device] = candidates
        outcome = _UPSTREAM
        for refusals, backend, decision in candidates:
            for refusal in refusals:
                if (reason := refusal(owner, *operands)) is not None:
                    outcome = answers.refused(backend, reason, refusal)
                    break
            else:
                return decision
        return None, outcome

    def _call(
        self, owner: object, upstream: Callable[..., object], /, *args: object, **kwargs: object
    ) -> Any:
        try:
            operands = self._binder()(*args, **kwargs)
        except TypeError:
            return upstream(*args, **kwargs)  # upstream raises its own error
        decide = partial(self._decide, owner, (*operands, upstream), None)
        recorded = self._recorded()
        if recorded and self._hooks_in_force(False) is not None:
            run, outcome = self._decided((id(self), id(owner)), partial(decide, upstream))
        else:
            run, outcome = decide()
        if outcome is not None:
            self._note(owner, outcome, recorded)
        return upstream(*args, **kwargs) if run is None else run(*operands)

    def _changed(self, answers: Answers, upstream: Callable[..., object]) -> Outcome | None:
        """Return the outcome of a call of ``upstream`` if it is not the recognised function, or None."""
        if (changed := self._skipped.changed_function(upstream)) is None:
            return None
        return answers.refused(answers.wanted, changed) if changed else _replaced_by(name_of(upstream))

    def _binder(self) -> Callable[..., tuple[Any, ...]]:
        if self._bind is None:
            self._bind = binder(self.parameters, operand_names(self.op, self.variant))
        return self._bind


@lru_cache
def _replaced_by(name: str) -> Outcome:
    return Outcome(REPLACED, f"replaced by {name}")


def _rebuilt(*arguments: Any) -> Slot:
    """Return a slot for functions that were copied by value: whether these were edited is unknown."""
    slot = Slot(*arguments)
    slot._skipped.text = Text((), {})
    return slot


_CALL, _APART = Slot.call.__code__, Slot._run_apart.__code__
