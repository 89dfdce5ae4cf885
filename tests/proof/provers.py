"""Runs a site through its guard and through upstream's body, and keeps count of what was reached.

The guarded path runs the op's reference kernel; upstream's body runs in the same object with ``eager``
chosen, so that both see the same parameters.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.proof.build import Unbuildable, build
from tests.proof.compare import MODE, Differs, Run, agree, meaningful, run
from tests.proof.inputs import Calls, Inputs
from veomni_hook.kernels.selection.process_choice import STATE, set_choice
from veomni_hook.kernels.slot import Slot

#: What a body raises that cannot take the inputs.
UNFIT = (TypeError, RuntimeError, IndexError, AttributeError, ValueError, AssertionError, KeyError)


class Unreached(Exception):
    """No call got through the guard to the kernel."""


class Unfit(Exception):
    """Upstream's body cannot take these inputs."""


@dataclass(frozen=True)
class Proof:
    """What holds.

    Attributes:
        gradients: how many were compared; 0 for the text of a call.
        errors: the largest relative errors by dtype and tensor; none: everything is equal bit for bit.
    """

    gradients: int
    errors: Mapping[str, float] = field(default_factory=dict)


def slots_of(module: Any, op: str) -> list[Slot]:
    """The slots of a patched module for one op, which from now on serve whoever asks: provers ask themselves."""
    slots = [value for value in vars(module).values() if isinstance(value, Slot) and value.op == op]
    for slot in slots:
        slot._skipped.text = None
    return slots


#: Told of every run: the choice of kernels, and what it raised.
watchers: list[Callable[[str, Exception | None], None]] = []


def with_kernels(choice: str, call: Callable[[], Run]) -> Run:
    """Run something under a choice of kernels."""
    before = str(STATE.choice)
    set_choice(choice)
    raised: Exception | None = None
    try:
        return call()
    except Exception as error:
        raised = error
        raise
    finally:
        set_choice(before)
        for watcher in watchers:
            watcher(choice, raised)


def typed(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs with floating tensors in ``dtype``."""
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


class Tally:
    """Which of the variants of a site were reached in which dtypes, and how well they agree."""

    def __init__(self, variant: str) -> None:
        self._wanted = set(variant.split("|")) - {""}
        self._fits: set[torch.dtype] = set()
        self._reached: set[tuple[str, torch.dtype]] = set()
        self._notes: dict[str, None] = {}
        self._errors: dict[str, float] = {}
        self._gradients = 0

    def note(self, text: str) -> None:
        """Keep a reason for which a call reached nothing."""
        self._notes[text] = None

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether upstream's body took any call in a dtype."""
        return dtype in self._fits

    def add(
        self,
        expected: Run,
        found: Run,
        taken: set[str],
        dtype: torch.dtype,
        needed: Iterable[str],
        *,
        counts: bool = True,
    ) -> None:
        """Compare the two runs of one call, which went to the kernels of the variants ``taken``.

        Gradients of ``needed`` have to be there. A call that does not count is compared, and reaches nothing.
        """
        # Without a kernel both are upstream's body.
        errors = agree(expected, found, dtype=dtype, exact=not taken)
        self._fits.add(dtype)
        if taken & self._wanted:
            meaningful(expected, needed)
            for tensor, error in errors.items():
                key = f"{str(dtype).removeprefix('torch.')} {tensor}"
                self._errors[key] = max(error, self._errors.get(key, 0.0))
            self._gradients += len(expected.gradients)
            self._reached |= {(variant, dtype) for variant in taken if counts}

    def compare(
        self,
        slots: list[Slot],
        owner: nn.Module,
        call: Callable[..., Any],
        inputs: Inputs,
        dtype: torch.dtype,
        needed: Iterable[str],
        *,
        counts: bool = True,
    ) -> None:
        """Run and compare a call, where upstream's body takes it; keep a note where it does not, and of refusals."""
        try:
            expected, found, taken, refusals = both(slots, owner, call, inputs)
        except Unfit as error:
            self.note(str(error))
            return
        for refusal in refusals:
            self.note(refusal)
        self.add(expected, found, taken, dtype, needed, counts=counts)

    def enough(self) -> bool:
        """Whether further calls would only repeat: all derivatives of every variant were compared."""
        return MODE.run is not None and self._reached >= set(itertools.product(self._wanted, MODE.dtypes))

    def proof(self) -> Proof:
        """What was found.

        Raises:
            Unreached: a variant was not reached in each dtype.
        """
        missing = [
            f"{v}@{d}" for v in sorted(self._wanted) for d in MODE.dtypes if (v, d) not in self._reached
        ]
        if missing or not self._wanted:
            raise Unreached(f"no call reached {missing}: {'; '.join(self._notes) or 'no calls'}"[:600])
        return Proof(self._gradients, self._errors)


def both(
    slots: list[Slot], owner: nn.Module, call: Callable[..., Any], inputs: Inputs
) -> tuple[Run, Run, set[str], list[str]]:
    """Run upstream's body and the guarded path; also the variants that ``owner`` got, and refusals.

    Raises:
        Unfit: upstream's body raises.
        Differs: it does not, and the guarded path does.
    """
    try:
        expected = with_kernels("eager", lambda: run(call, inputs, owner))
    except UNFIT as error:
        shapes = {k: list(v.shape) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        raise Unfit(f"{shapes}: {type(error).__name__}: {error}"[:200]) from error
    for slot in slots:
        slot.records.clear()
    try:
        found = with_kernels(MODE.kernels, lambda: run(call, inputs, owner))
    except Exception as error:
        raise Differs(f"only the guarded path raises {type(error).__name__}: {error}") from error
    # Under the choice in force again, a slot may be idle: what it noted is read as it is.
    held = [(slot, slot.records.of(owner)) for slot in slots]
    outcomes = [(slot.variant, noted.latest.last) for slot, noted in held if noted is not None]
    taken = {variant for variant, outcome in outcomes if outcome.backend == MODE.kernels}
    refusals = [f"{v}: {outcome.reason}" for v, outcome in outcomes if outcome.backend != MODE.kernels]
    return expected, found, taken, refusals


def class_prover(calls: Calls) -> Callable[[Any, Any], Proof]:
    """The prover of an op whose sites are methods of classes that can be built alone."""
    return lambda site, module: _prove_class(site, module, calls)


def _prove_class(site: Any, module: Any, calls: Calls) -> Proof:
    """Prove a site in a class's method, over flags of the instance and dtypes."""
    name, _, path = site.target.partition(".")
    method = path.split(".")[0]
    slots, tally = slots_of(module, site.op), Tally(site.variant)
    owners = list(instances(getattr(module, name)))
    # Dropout and noise are drawn alike in both runs.
    owners.append(copy.deepcopy(owners[0]).train())
    for held, dtype in MODE.mixed():
        # What upstream keeps in float32 need not take parameters in another dtype.
        counts = held is dtype or not tally.fits(dtype)
        for owner in owners:
            owner.to(held)
            for inputs in calls(owner, method):
                if tally.enough():
                    return tally.proof()
                given, call = typed(inputs, dtype), getattr(owner, method)
                tally.compare(slots, owner, call, given, dtype, list(inputs)[:1], counts=counts)
    return tally.proof()


def instances(cls: type[nn.Module]) -> Iterator[nn.Module]:
    """The class as built, with its optional arguments, and with each of its flags turned, alone and together."""
    failure: Unbuildable | None = None
    built: list[bool] = []
    for optional in (False, True):
        try:
            yield build(cls, optional=optional)
            built.append(optional)
        except Unbuildable as error:
            failure = failure or error
    if failure is not None and not built:
        raise failure
    first = build(cls, optional=built[0])
    flags = [
        name
        for name, value in vars(first).items()
        if isinstance(value, bool) and not name.startswith("_") and name != "training"
    ]
    for count in (1, 2):
        for turned in itertools.combinations(flags[:5], count):
            owner = build(cls, optional=built[0])
            for name in turned:
                setattr(owner, name, not getattr(owner, name))
            yield owner
