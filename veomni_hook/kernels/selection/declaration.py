"""What an op's folder declares: its variants, its kernels, and what these need from a machine.

Plain data: code is named, and imported on first use. A code reference is ``module:attribute``, or
``module:function(text)``: what the function returns for this text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.system import System

__all__ = [
    "EAGER",
    "NPU",
    "REFERENCE",
    "REFERENCE_DESCRIPTION",
    "RESERVED",
    "Kernel",
    "Op",
    "Requirement",
    "Variant",
]

EAGER = "eager"
REFERENCE = "reference"
RESERVED = ("auto", EAGER)
REFERENCE_DESCRIPTION = "the formula in plain PyTorch; for checking results, not for speed"


@dataclass(frozen=True)
class Requirement:
    """What a kernel needs from a `System`; empty fields mean no requirement.

    ``min_capability`` is that of NVIDIA's GPUs, and ``rocm`` whether AMD's will do where ``cuda`` does.
    ``distributions`` use pip's syntax, ``name`` or ``name>=version``.
    """

    devices: tuple[str, ...] = ()
    min_capability: tuple[int, int] | None = None
    triton: bool = False
    distributions: tuple[str, ...] = ()
    rocm: bool = True

    def unmet(self, system: System) -> str | None:
        """Return why ``system`` does not meet the requirement (needed and found), or None if it does."""
        if self.devices and system.device not in self.devices:
            return f"needs a device of type {' or '.join(self.devices)}, found {system.device}"
        if system.rocm and not self.rocm:
            return "needs an NVIDIA GPU, found ROCm, where it was not checked"
        least = None if system.rocm else self.min_capability
        if least is not None and (system.capability or (0, 0)) < least:
            capability = "none" if system.capability is None else ".".join(map(str, system.capability))
            return f"needs compute capability {'.'.join(map(str, least))}, found {capability}"
        if self.triton and system.triton is None:
            return "needs triton, which is not installed"
        return next(filter(None, map(system.lacks, self.distributions)), None)


#: What kernels of the backend ``npu`` need: an Ascend device, and torch_npu from the oldest release that was
#: checked against their calls (`python -m tests.ascend.releases`).
NPU = Requirement(devices=("npu",), distributions=("torch_npu>=2.7.1",))


@dataclass(frozen=True)
class Kernel:
    """One implementation of one variant of one op.

    ``load`` names the function that patched code calls. ``refuses`` names a function
    ``(owner, *operands) -> str | None`` that is called at every call and returns why the kernel cannot take
    this call. ``loses`` has the same form, is called under ``auto`` only, and returns a reason for calls on
    which the kernel was measured slower than the upstream code. ``priority`` orders kernels under ``auto``,
    higher first; a kernel that is not ``automatic`` runs only if its backend was chosen by name.

    A ``traceable`` kernel and its ``refuses`` work under ``torch.compile(fullgraph=True)``: there the kernel
    runs if its backend was chosen by name, and under ``auto`` if it ``beats_inductor``.

    ``invariant``: the device types on which a row of its result has the same bits in any batch, at least
    while `veomni_hook.batch_invariance` computes matrix products; also of kernels that compute no rows. Only
    these run in that mode.
    """

    op: str
    variant: str
    backend: str
    load: str
    refuses: str | None = None
    loses: str | None = None
    requires: Requirement = field(default_factory=Requirement)
    priority: int = 0
    description: str = ""
    automatic: bool = True
    traceable: bool = False
    beats_inductor: bool = False
    invariant: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = f"Kernel(op={self.op!r}, variant={self.variant!r}, backend={self.backend!r})"
        if self.backend in RESERVED or not self.backend.isidentifier():
            raise KernelError(
                f"{self.backend!r} cannot name a backend",
                where=where,
                fix=f"use an identifier other than {RESERVED}",
            )
        for reference in (self.load, self.refuses, self.loses):
            code = () if reference is None else reference.partition("(")[0].split(":")
            if reference is not None and (len(code) != 2 or not all(code)):
                raise KernelError(
                    f"{reference!r} is not a code reference",
                    where=where,
                    fix="write 'package.module:attribute'",
                )


@dataclass(frozen=True)
class Variant:
    """One formula of an op: a row of its table (`veomni_hook.kernels.selection.table`).

    ``formula`` states it in one line. ``reference`` names a plain torch function that computes it.
    ``operands`` are the names of a kernel's arguments, in order; empty: the parameters of the reference.
    ``unasked`` says what it means if the modules below a site are called but the site is not; empty: nothing
    in particular. ``kernels`` compute it, beside the reference. ``refuses`` has the form of
    `Kernel.refuses`: what none of them can compute; a kernel's own rule is asked after it. ``form`` is what
    the op's own code has to know of it.

    For a guard whose caller may ask for what upstream's code cannot give: ``asks`` names a function
    ``(owner, *operands) -> Any`` whose result is true if it does. Under ``torch.compile``, ``auto`` then
    takes traceable kernels that do not beat Inductor, too. ``settles`` names a function ``(owner, reason,
    *operands) -> object`` that is called where no kernel computes a call, and raises KernelError if that
    leaves a request unanswered.
    """

    formula: str
    reference: str = ".reference:{variant}"
    operands: tuple[str, ...] = ()
    unasked: str = ""
    kernels: tuple[Kernel, ...] = ()
    refuses: str | None = None
    form: Any = None
    asks: str | None = None
    settles: str | None = None


@dataclass(frozen=True)
class Op:
    """An operation and its variants by name.

    ``yields`` names a function ``(owner, *operands) -> str | None`` that is called under ``auto`` before
    every kernel of the op. It returns a reason if the user chose the upstream code there. ``parts`` are the
    ops whose sites, at the same module and directly below it, a kernel of this op also computes. ``offers``
    names a function ``(slot, module class)`` that is called for every class whose guard is below another
    decorator: it may add kernels to the implementations that this decorator lets users choose from.
    ``prepares`` names a function ``(slot)`` that is called when a slot of the op is created, and before steps
    are predicted.
    ``bypassed`` names a function ``(owner, variant) -> str | None`` that returns why no call of ``owner``
    gets a kernel under ``auto``; `explain` asks it for modules without a recorded call.
    ``overrides`` names a function ``(owner, wanted) -> str | None`` that returns which choice of the user has
    no effect because the backend ``wanted`` was chosen by name.
    ``remarks`` names a function ``(owner, backend) -> str | None`` that returns what else `explain` has to
    say of a module that ``backend`` computed.
    ``derives`` names a function ``(name) -> Variant | None``: formulas that are not in ``variants``, such as
    new combinations of what they differ in, become variants when they are first asked for.
    ``invariant``: as of a `Kernel`, for upstream's code: on a CPU it adds along one row after the other, on a
    GPU as the batch suggests.
    """

    name: str
    variants: Mapping[str, Variant]
    yields: str | None = None
    parts: tuple[str, ...] = ()
    offers: str | None = None
    overrides: str | None = None
    prepares: str | None = None
    bypassed: str | None = None
    remarks: str | None = None
    derives: str | None = None
    invariant: tuple[str, ...] = ()
