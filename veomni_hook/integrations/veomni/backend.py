"""One of our kernels, called without a slot of ours: by a slot of VeOmni.

VeOmni's guard asks only whether a kernel is bound and then calls it; it has no way back to the code below.
So a call that the kernel refuses runs the variant's formula in plain PyTorch, with one warning for each
reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from veomni_hook.errors import KernelError
from veomni_hook.integrations.veomni.upstream import attribute
from veomni_hook.kernels.selection.declaration import Kernel
from veomni_hook.kernels.selection.registry import load_attribute, registry
from veomni_hook.kernels.selection.select import system_of
from veomni_hook.kernels.slot.candidates import Site

__all__ = ["BACKENDS", "Backend", "kernel_of", "name_of", "unmet"]

#: The backends that are offered. Liger's kernels are in VeOmni's registry already.
BACKENDS = ("torch", "triton", "npu")


def name_of(backend: str) -> str:
    """Return the name of ``backend`` in VeOmni's configuration."""
    return f"veomni_hook_{backend}"


def kernel_of(op: str, variant: str, backend: str) -> Kernel:
    """Return our kernel; KernelError if there is none."""
    for kernel in registry.kernels(op, variant):
        if kernel.backend == backend:
            return kernel
    raise KernelError(
        f"{op}/{variant} has no {backend!r} kernel",
        where="VeOmni's kernel registry",
        fix="choose another name",
    )


def unmet(kernel: Kernel) -> None:
    """Raise KernelError if ``kernel`` cannot run on this machine."""
    devices = kernel.requires.devices
    device = devices[0] if len(devices) == 1 else attribute("veomni.utils.device", "get_device_type")()
    reason = kernel.requires.unmet(system_of(device))
    if reason is not None:
        raise KernelError(
            f"{kernel.op}/{kernel.variant} cannot use {kernel.backend!r}: {reason}",
            where=f"VeOmni's {name_of(kernel.backend)}",
            fix="choose another name in OpsImplementationConfig, or eager",
        )


class Backend:
    """The kernel of ``backend`` for ``op``/``variant``, loaded. Raises KernelError if it cannot run here."""

    def __init__(self, op: str, variant: str, backend: str) -> None:
        kernel = kernel_of(op, variant, backend)
        unmet(kernel)
        self._kernel = kernel
        self._run = load_attribute(kernel.load)
        self._rules = tuple(map(load_attribute, registry.rules(kernel)))
        self._formula = load_attribute(registry.op(op).variants[variant].reference)
        self._site = Site(op, variant, "veomni", set())

    def __call__(self, *operands: object) -> Any:
        """Compute the variant from the operands of its reference."""
        return self.asked(*operands)(*operands)

    def asked(self, *operands: object) -> Callable[..., Any]:
        """Return what computes a call: the kernel, or the formula if the kernel refuses these operands.

        ``operands`` are those that guards pass to the kernel's rule.
        """
        compiling = torch.compiler.is_compiling()
        if compiling and not self._kernel.traceable:
            return self._formula  # Inductor compiles it
        reason = next(filter(None, (rule(None, *operands) for rule in self._rules)), None)
        if reason is None:
            return self._run
        if not compiling:
            said = f": its formula in PyTorch instead of {self._kernel.backend}: {reason}"
            self._site.say(logging.WARNING, said)
        return self._formula
