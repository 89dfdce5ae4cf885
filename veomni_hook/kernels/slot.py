"""Slots: what patched code asks for a kernel.

A slot is a global of the patched module and belongs to one op and variant. A guard asks `Slot.kernel`, a call
site of a function `Slot.at`; `Slot.reached` decorates a class whose guard a decorator of upstream covers.

A slot holds nothing of a model: outcomes are kept beside the modules (weakly), so that pickling, copying and
state dicts see no difference. What a module is bound to (`veomni_hook.kernels.binding`) wins over the choice
of the process. Under ``torch.compile`` only traceable kernels answer (`veomni_hook.kernels.compiled`), and
under ``auto`` only those that beat Inductor; under ``torch.export`` none: the upstream code is exported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, TypeVar
from weakref import ref

from veomni_hook.kernels.answers import REPLACED, Answers, Outcome, Site
from veomni_hook.kernels.binding import BINDING
from veomni_hook.kernels.choice import Choice
from veomni_hook.kernels.compiled import Compiled, device_of
from veomni_hook.kernels.record import Record
from veomni_hook.kernels.registry import EAGER, load_attribute, registry
from veomni_hook.kernels.skipped import Skipped
from veomni_hook.kernels.state import STATE

__all__ = ["Outcome", "Slot"]

_UPSTREAM = Outcome(EAGER, "no kernel can run here")
_INACTIVE = Outcome(EAGER, "veomni_hook is deactivated")

ModuleClass = TypeVar("ModuleClass", bound=type)
Taking = Callable[..., tuple[Any, ...]]


class _NoKernelError(BaseException):
    """Brings the answer of a guard to `Slot.reached`, through the method that the guard stands in."""

    def __init__(self, slot: Slot, owner: Any) -> None:
        super().__init__()
        self.slot = slot
        self.owner = owner


class Slot:
    """The place in a patched module where a kernel of ``op``/``variant`` may take over.

    ``parameters`` are those of the upstream function at whose calls `at` stands, in the form that
    `veomni_hook.kernels.arguments` describes; empty: they are the op's operands. ``skips`` are the
    definitions of the module whose calls kernels skip, as `veomni_hook.kernels.skipped` describes: the slot
    is made in the module's own frame, and compares them with the code that this frame runs.
    """

    def __init__(
        self,
        op: str,
        variant: str,
        module_name: str,
        parameters: str = "",
        skips: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        # Patched modules have imported torch; whoever only reads the names here need not.
        from torch import compiler, is_grad_enabled

        registry.check(op, variant)
        self.op = op
        self.variant = variant
        self.module_name = module_name
        self.parameters = parameters
        self.skips = dict(skips or {})
        self._skipped = Skipped(self.skips, module_name, sys._getframe(1))
        self._is_compiling = compiler.is_compiling
        self._compiler = compiler
        self._with_gradients = is_grad_enabled
        self._site = Site(op, variant, module_name, set())
        self._epoch = -1
        self._version = -1
        #: For modules that are bound to nothing.
        self._answers: Answers
        #: By what is wanted, and what the upstream code runs for.
        self._known: dict[tuple[str, str], Answers] = {}
        self._bound: dict[str, Answers] = {}
        self._bind: Callable[..., tuple[Any, ...]] | None = None
        self._compiled = Compiled(
            op, lambda wanted: self._answers_to(Choice(ops={op: wanted})), self._binder, self._skipped
        )
        # By id with a weak reference: a WeakKeyDictionary would cost 1.5 us at every call.
        self._outcomes: dict[int, Record] = {}
        #: The last function that stood in upstream's place, and what its calls get.
        self._replacement: tuple[Any, Outcome] = (None, _UPSTREAM)
        # Per thread, the module whose call came through `reached` and whose guard has not been asked yet.
        self._waiting: threading.local | None = None

    def __repr__(self) -> str:
        parameters = f", parameters={self.parameters!r}" if self.parameters else ""
        skips = f", skips={self.skips!r}" if self.skips else ""
        return f"Slot({self.op!r}, {self.variant!r}, {self.module_name!r}{parameters}{skips})"

    def __reduce__(self) -> tuple[object, ...]:
        # Functions that close over a slot are pickled by value in some tools; a slot is rebuilt, not copied.
        return (Slot, (self.op, self.variant, self.module_name, self.parameters, self.skips))

    def kernel(self, owner: Any, *operands: Any) -> Callable[..., Any] | None:
        """Return the function that computes this call, or None: run the upstream code.

        ``owner`` is the module whose ``forward`` asks; ``operands`` are what kernels decide by (the first
        one's device decides between them; of a list of tensors the first tensor's). Raises KernelError if a
        backend was chosen by name that has no kernel for this variant, or cannot run on this machine.
        """
        if self._is_compiling():
            return None if self._exported() else self._compiled.kernel(owner, operands)
        answers = self.answers(owner)
        run = None if answers.idle is not None else self._ask(answers, owner, operands)
        if self._waiting is not None and getattr(self._waiting, "owner", None) is owner:
            self._waiting.owner = None
            if run is None:
                raise _NoKernelError(self, owner)
        return run

    def at(self, owner: Any, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call in the place of ``upstream``, with the very same arguments.

        ``upstream`` itself where no kernel comes into question, and where it, or a function that it calls, is
        not the one that was recognised. Else a function that asks kernels
        with the op's operands and, last, ``upstream``; the kernel that takes the call is called with the
        operands. It calls ``upstream`` where all refuse, and where the arguments do not fit its parameters.
        """
        if self._is_compiling():
            return upstream if self._exported() else self._compiled.at(owner, upstream)
        if (answers := self.answers(owner)).idle is not None:
            return upstream
        if (changed := self._skipped.changed_function(upstream)) is not None:
            found = answers.refused(answers.wanted, changed) if changed else self._replaced_by(upstream)
            self._note(owner, found)
            return upstream
        return partial(self._call, owner, upstream)

    def reached(self, taking: Taking) -> Callable[[ModuleClass], ModuleClass]:
        """Let calls of a module class reach the guard in its ``forward``, which another decorator covers.

        For use above a class decorator that wraps ``forward`` (and says so in ``__wrapped__``). A call goes
        to the wrapped ``forward``, whose first statement is the guard. If that finds no kernel, nothing has
        run yet, and the call goes to the wrapper. ``taking`` gives the guard's operands for the arguments of
        a call: under ``torch.compile`` the kernel is asked for and called from here, since the code behind
        the guard has to be no part of the graph.
        """
        return partial(self._reach, taking)

    def _reach(self, taking: Taking, decorated: ModuleClass) -> ModuleClass:
        from torch.nn import Module

        covering = vars(decorated).get("forward")
        guarded = getattr(covering, "__wrapped__", None)
        if covering is None or guarded is None:
            return decorated
        self._skipped.add_reached(decorated, Module)
        waiting = self._waiting = self._waiting or threading.local()

        @wraps(covering)
        def forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._is_compiling():
                operands = taking(module, *args, **kwargs)
                run = None if self._exported() else self._compiled.kernel(module, operands)
                return covering(module, *args, **kwargs) if run is None else run(*operands)
            if self.answers(module).idle is not None:
                return covering(module, *args, **kwargs)
            held, waiting.owner = getattr(waiting, "owner", None), module
            try:
                return guarded(module, *args, **kwargs)
            except _NoKernelError as signal:
                if signal.slot is not self or signal.owner is not module:
                    raise
            finally:
                waiting.owner = held
            return covering(module, *args, **kwargs)

        # A statement, so that type checkers see no assignment to a method.
        setattr(decorated, "forward", forward)  # noqa: B010
        if (offers := registry.ops()[self.op].offers) is not None:
            load_attribute(offers)(self, decorated)
        return decorated

    def answers(self, owner: Any = None) -> Answers:
        """Return what the module ``owner`` is answered (None: any module that is bound to nothing)."""
        if STATE.epoch != self._epoch or registry.version != self._version:
            self._refresh()
        if owner is None or (bound := owner.__dict__.get(BINDING)) is None or not STATE.active:
            return self._answers
        wanted = bound.get(self.op)
        if wanted is None:
            return self._answers
        return self._bound.get(wanted) or self._bound.setdefault(
            wanted, self._answers_to(Choice(ops={self.op: wanted}))
        )

    def outcome(self, owner: Any) -> Outcome | None:
        """Return what the last call of the module ``owner`` got; None if it has not asked yet.

        Calls are not noted while no kernel comes into question; why is what is returned then.
        """
        if (idle := self.answers(owner).idle) is not None:
            return idle
        held = self.record(owner)
        return None if held is None else held.latest.last

    def record(self, owner: Any) -> Record | None:
        """Return the calls of the module ``owner`` that kernels came into question for, or None."""
        held = self._outcomes.get(id(owner))
        return held if held is not None and held.owner() is owner else None

    def traced(self, owner: Any, *, compiled: bool = False) -> Outcome | None:
        """Return what ``torch.compile`` made of the calls of the module ``owner``; None: nothing is known.

        ``compiled``: it is known to be, and may run what was traced for another module of its kind.
        """
        return self._compiled.traced(owner, self.answers(owner).wanted, compiled=compiled)

    def _exported(self) -> bool:
        """Whether a program is being exported, which has to run without this package."""
        # Under torch 2.11 dynamo takes is_exporting() for true, whatever it traces for; torch 2.6 has none.
        return getattr(self._compiler, "_is_exporting_flag", False)

    def _refresh(self) -> None:
        """Take over the settings in force."""
        epoch, version = STATE.epoch, registry.version
        if version != self._version:
            self._known = {}
        self._bound = {}
        if STATE.active:
            self._answers = self._answers_to(STATE.effective)
        else:
            self._answers = Answers(self._site, Choice(EAGER), _INACTIVE)
        self._epoch, self._version = epoch, version

    def _answers_to(self, choice: Choice) -> Answers:
        key = (choice.backend(self.op), choice.why(self.op))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Answers(self._site, choice)
        return found

    def _ask(self, answers: Answers, owner: Any, operands: tuple[Any, ...]) -> Callable[..., Any] | None:
        skipped = self._skipped
        if skipped.by_methods and (changed := skipped.changed(owner, operands)) is not None:
            self._note(owner, answers.refused(answers.wanted, changed))
            return None
        outcome = _UPSTREAM
        for run, refusals, backend, taken in answers.candidates(device_of(operands)):
            for refusal in refusals:
                reason = refusal(owner, *operands)
                if reason is not None:
                    outcome = answers.refused(backend, reason)
                    break
            else:
                self._note(owner, taken)
                return run
        self._note(owner, outcome)
        return None

    def _call(self, owner: Any, upstream: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            operands = self._binder()(*args, **kwargs)
        except TypeError:
            return upstream(*args, **kwargs)  # it says itself what does not fit
        run = self._ask(self.answers(owner), owner, (*operands, upstream))
        return upstream(*args, **kwargs) if run is None else run(*operands)

    def _binder(self) -> Callable[..., tuple[Any, ...]]:
        if self._bind is None:
            from veomni_hook.kernels.arguments import binder_for

            self._bind = binder_for(self.op, self.variant, self.parameters)
        return self._bind

    def _replaced_by(self, function: Any) -> Outcome:
        """Return the outcome of a call that ``function`` gets, which stands in the place of upstream's."""
        if self._replacement[0] is not function:
            from veomni_hook.kernels.standing import name_of

            self._replacement = (function, Outcome(REPLACED, f"replaced by {name_of(function)}"))
        return self._replacement[1]

    def _note(self, owner: Any, outcome: Outcome) -> None:
        held = self._outcomes.get(id(owner))
        if held is None or held.owner() is not owner:
            held = self._begin(owner)
        try:
            training = owner.training and self._with_gradients()
        except AttributeError:
            training = False  # no module
        tally = held.latest = held.training if training else held.evaluation
        if tally.last is outcome:
            tally.run += 1
        else:
            tally.turn(outcome)

    def _begin(self, owner: Any) -> Record:
        """Start the record of a module at its first call."""
        key = id(owner)
        held = self._outcomes[key] = Record(ref(owner, lambda _: self._outcomes.pop(key, None)))
        from veomni_hook.kernels.stacked import warn_of_first_call

        warn_of_first_call(self.module_name, owner)
        return held
