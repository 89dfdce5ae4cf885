"""The registry of ops, variants and kernels.

Every op declares its variants and kernels in ``kernels/<op>/variants.py``: a folder with this file is an op,
and listings have the order of the alphabet. More come from `register_kernel`,
and from installed distributions through the entry point group ``veomni_hook.kernels``: each entry point names
a `Kernel`, a tuple or list of them, or a module with ``KERNELS``. Nothing here imports torch: a kernel names
its code and is loaded on first use. So is the declaration of an op: a model has a few of them.

Every variant has the backend ``reference``: its formula in plain PyTorch, which the tests compare kernels
with. ``auto`` never selects it.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.declaration import (
    REFERENCE,
    REFERENCE_DESCRIPTION,
    RESERVED,
    Kernel,
    Op,
    Variant,
)
from veomni_hook.kernels.selection.table import completed
from veomni_hook.plugins import KERNELS, described, give_up, in_force, remedy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "Registry",
    "built_in",
    "load_attribute",
    "register_kernel",
    "registry",
]

# Threads may import modules with different ops.
_LOCK = threading.RLock()
_KERNELS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@cache
def built_in() -> tuple[str, ...]:
    """Return the ops of this package, by alphabet; imports none of them.

    The import system's finders look into the folders, so compiled files and zip files are alike.
    """
    if os.path.isdir(_KERNELS):
        names = [name for name in os.listdir(_KERNELS) if "." not in name]
    else:
        from pkgutil import iter_modules  # takes longer than all the rest

        names = [one.name for one in iter_modules([_KERNELS]) if one.ispkg]
    folders = {name: os.path.join(_KERNELS, name) for name in names}
    return tuple(sorted(op for op, folder in folders.items() if PathFinder.find_spec("variants", [folder])))


class Registry:
    """Ops and kernels by name; duplicate declarations are errors.

    Every variant gets a kernel of backend ``reference`` that refuses no call; a declared one replaces it.
    """

    def __init__(self) -> None:
        self._ops: dict[str, Op] = {}
        self._kernels: dict[tuple[str, str, str], Kernel] = {}
        self._loading = False
        self._plugged: tuple[EntryPoint, ...] = ()
        self._announced: dict[tuple[str, str, str], EntryPoint] = {}
        self.version = 0

    def add_op(self, op: Op) -> None:
        """Declare ``op`` and its variants' kernels. Raises KernelError if its name is taken."""
        if op.name in self._ops:
            raise KernelError(
                f"op {op.name!r} is declared twice", where="kernel registry", fix="rename one of them"
            )
        self._ops[op.name] = op
        self._add_kernels(op.name, op.variants)

    def add(self, kernel: Kernel) -> None:
        """Declare ``kernel``. Raises KernelError for an unknown op or variant, and for a duplicate."""
        self.check(kernel.op, kernel.variant)
        key = (kernel.op, kernel.variant, kernel.backend)
        known = self._kernels.get(key)
        if known is not None and known != self._derived(kernel.op, kernel.variant):
            raise KernelError(
                f"{kernel.op}/{kernel.variant} already has a {kernel.backend!r} kernel",
                where=known.load,
                fix="register yours under another backend name",
            )
        self._kernels[key] = kernel
        self.version += 1

    def replace(self, kernel: Kernel) -> None:
        """Declare ``kernel`` instead of its variant's kernel of that backend; KeyError if there is none."""
        key = (kernel.op, kernel.variant, kernel.backend)
        if key not in self._kernels:
            raise KeyError(key)
        self._kernels[key] = kernel
        self.version += 1

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo, at the end of the block, all that is declared or replaced in it, as tests do.

        Slots look their kernels up again afterwards.
        """
        self._load(built_in())
        before = {name: copy(value) for name, value in vars(self).items()}
        try:
            yield
        finally:
            vars(self).update({**before, "version": self.version + 1})

    def rules(self, kernel: Kernel) -> tuple[str, ...]:
        """Return the code references that say why a kernel cannot take a call, in their order."""
        rules = self.op(kernel.op).variants[kernel.variant].refuses, kernel.refuses
        return tuple(rule for rule in rules if rule is not None)

    def announced_by(self, kernel: Kernel) -> EntryPoint | None:
        """Return the entry point that added a kernel; None for built-in and registered ones."""
        return self._announced.get((kernel.op, kernel.variant, kernel.backend))

    def check(self, op: str, variant: str | None = None) -> None:
        """Raise KernelError, with the valid names, unless ``op`` (and ``variant``) exist."""
        if op not in self.names():
            names = ", ".join(self.names())
            raise KernelError(f"there is no op {op!r}", where="kernel registry", fix=f"ops: {names}")
        if variant is not None and self.variant(op, variant) is None:
            names = ", ".join(self.op(op).variants)
            raise KernelError(
                f"op {op!r} has no variant {variant!r}", where="kernel registry", fix=f"variants: {names}"
            )

    def names(self) -> list[str]:
        """Return the names of all ops; loads no declaration."""
        return list(dict.fromkeys((*built_in(), *self._ops)))

    def op(self, name: str) -> Op:
        """Return one op; KeyError if there is none of this name."""
        self._load((name,))
        return self._ops[name]

    def variant(self, op: str, name: str) -> Variant | None:
        """Return a variant of an op, which may derive it; None if there is none of this name."""
        with _LOCK:
            declared = self.op(op)
            if name not in declared.variants and declared.derives is not None:
                row: Variant | None = load_attribute(declared.derives)(name)
                if row is None:
                    return None
                new = {name: completed(op, name, row)}
                version = self.version
                self._ops[op] = dataclasses.replace(declared, variants={**declared.variants, **new})
                self._add_kernels(op, new)
                self.version = version  # no slot has to look again
            return self._ops[op].variants.get(name)

    def ops(self) -> Mapping[str, Op]:
        """Return every op by name."""
        self._load(built_in())
        return self._ops

    def loaded(self) -> list[str]:
        """Return the ops whose declarations are loaded: all that anybody has added a kernel to are."""
        return list(self._ops)

    def refresh(self) -> None:
        """Follow what plugins announce now, which may change the version."""
        self._load(())

    def kernels(self, op: str | None = None, variant: str | None = None) -> list[Kernel]:
        """Return the kernels of ``op`` and ``variant`` (None: all), in ``auto``'s order of preference."""
        self._load(built_in() if op is None else (op,))
        matching = [
            kernel
            for kernel in self._kernels.values()
            if op in (None, kernel.op) and variant in (None, kernel.variant)
        ]
        return sorted(matching, key=lambda kernel: (not kernel.automatic, -kernel.priority))

    def supplied(self, op: str, variant: str) -> bool:
        """Return whether any machine has a kernel: one for ``auto``, or code besides the reference."""
        reference = self.op(op).variants[variant].reference
        return any(kernel.automatic or kernel.load != reference for kernel in self.kernels(op, variant))

    def backends(self, op: str | None = None) -> list[str]:
        """Return the valid names in a choice for ``op`` (None: for all ops)."""
        return [*RESERVED, *dict.fromkeys(kernel.backend for kernel in self.kernels(op))]

    def distributions(self) -> list[str]:
        """Return the names of all distributions that kernels require."""
        return sorted({name for kernel in self.kernels() for name in kernel.requires.distributions})

    def by_name(self, op: str) -> list[str]:
        """Return the declared backends of an op, if ``auto`` takes none of them; otherwise nothing."""
        declared = [kernel for variant in self.op(op).variants.values() for kernel in variant.kernels]
        if any(kernel.automatic for kernel in declared):
            return []
        return [*dict.fromkeys((*(kernel.backend for kernel in declared), REFERENCE))]

    def preset(self, backend: str) -> tuple[str, ...]:
        """Return the ops that ``backend`` applies to as a preset: those it has kernels for."""
        listed = {kernel.op for kernel in self.kernels() if kernel.backend == backend}
        return tuple(op for op in self.names() if op in listed)

    def _add_kernels(self, op: str, variants: Mapping[str, Variant]) -> None:
        for name in variants:
            self._kernels[op, name, REFERENCE] = self._derived(op, name)
        for variant in variants.values():
            for kernel in variant.kernels:
                self.add(kernel)

    def _load(self, names: Sequence[str]) -> None:
        """Add the declarations of these ops; of all, if what plugins announce has changed."""
        with _LOCK:
            if self._loading:  # `add` asks for the declarations, too
                return
            self._loading = True
            try:
                plugged = in_force(KERNELS)
                self._declare(names if plugged == self._plugged else built_in())
                if plugged != self._plugged:
                    self._plug(plugged)
            finally:
                self._loading = False

    def _declare(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self._ops and name in built_in()]
        if not missing:
            return
        version = self.version
        for name in missing:
            self.add_op(import_module(f"veomni_hook.kernels.{name}.variants").OP)
        # No slot has to look again, and listings have their order.
        self.version = version
        order = {name: place for place, name in enumerate(self.names())}
        self._ops = {name: self._ops[name] for name in order if name in self._ops}
        self._kernels = dict(sorted(self._kernels.items(), key=lambda item: order[item[0][0]]))

    def _plug(self, points: tuple[EntryPoint, ...]) -> None:
        """Replace the announced kernels by those of these entry points; one that fails adds none."""
        for key in self._announced:
            self._remove(*key)
        self._announced, self._plugged = {}, ()
        self.version += 1
        for point in points:
            added: dict[tuple[str, str, str], EntryPoint] = {}
            try:
                for kernel in _announced_kernels(point):
                    self.add(kernel)
                    added[kernel.op, kernel.variant, kernel.backend] = point
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit, too: a plugin must not be able to end a script
                for key in added:
                    self._remove(*key)
                what = error.what if isinstance(error, KernelError) else f"{type(error).__name__}: {error}"
                failure = KernelError(
                    f"{point.value} cannot be loaded: {what}", where=described(point), fix=remedy(point)
                )
                failure.__cause__ = error
                give_up(point, failure)
            else:
                self._announced |= added
        self._plugged = in_force(KERNELS)  # without those that failed

    def _remove(self, op: str, variant: str, backend: str) -> None:
        del self._kernels[op, variant, backend]
        if backend == REFERENCE:
            self._kernels[op, variant, backend] = self._derived(op, variant)

    def _derived(self, op: str, variant: str) -> Kernel:
        """Return the kernel of backend ``reference`` that a variant's declaration names."""
        return Kernel(
            op=op,
            variant=variant,
            backend=REFERENCE,
            load=self._ops[op].variants[variant].reference,
            description=REFERENCE_DESCRIPTION,
            automatic=False,
        )


def _announced_kernels(point: EntryPoint) -> Iterable[Kernel]:
    """Return the kernels that an entry point names; errors of its import propagate."""
    loaded = point.load()
    loaded = getattr(loaded, "KERNELS", loaded)
    kernels = (loaded,) if isinstance(loaded, Kernel) else loaded
    if not isinstance(kernels, tuple | list) or not all(isinstance(kernel, Kernel) for kernel in kernels):
        raise KernelError(
            "it is not a veomni_hook.Kernel, a tuple of them, or a module with KERNELS",
            where=described(point),
            fix=remedy(point),
        )
    return kernels


registry = Registry()


def register_kernel(kernel: Kernel) -> None:
    """Register ``kernel`` in this process.

    Raises KernelError if its op or variant does not exist (the message lists the valid names), or if its
    backend already has a kernel for the variant.
    """
    registry.add(kernel)


def load_attribute(reference: str) -> Callable[..., Any]:
    """Import and return what a code reference names; KernelError if it is not there."""
    code, _, text = reference.partition("(")
    module_name, attribute = code.split(":")
    try:
        value = getattr(import_module(module_name), attribute)
        return value(text.removesuffix(")")) if text else value  # type: ignore[no-any-return]
    except (Exception, SystemExit) as error:
        raise KernelError(
            f"kernel code {reference!r} cannot be loaded: {type(error).__name__}: {error}",
            where="kernel registry",
            fix="correct the kernel's load, refuses or loses, or install what it imports",
        ) from error
