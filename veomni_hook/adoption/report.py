"""The result of `veomni_hook.adopt`, and how to undo it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from veomni_hook.adoption.classes import former_class
from veomni_hook.errors import AdoptionError
from veomni_hook.kernels.float8.layers import adapt, format_of, restore
from veomni_hook.kernels.float8.setting import in_force
from veomni_hook.printable import printable

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Adoption", "Entry"]


@dataclass
class Entry:
    """Modules of one class with the same result.

    Attributes:
        kind: the name of the class.
        module: the module that the class is from.
        count: the number of modules.
        first: the place of the first one in the model; empty: the model itself.
        reason: why they were not adopted, or are patched already; empty if they were adopted.
        routed: the formulas for which they now ask kernels, as ``op/variant``.
    """

    kind: str
    module: str
    count: int
    first: str
    reason: str = ""
    routed: tuple[str, ...] = ()


class Adoption:
    """What `veomni_hook.adopt` returns; true if it changed something.

    Attributes:
        model: the name of the model's class.
        adopted: modules that run patched code from now on.
        before: modules that were already patched or adopted.
        refused: modules that patches apply to but that could not be adopted, with the reason.
        shared: by module, other names that patches change in it, such as functions. They stay unchanged,
            because models that are not adopted use them, too.
        off: why nothing was tried; empty if it was.
    """

    def __init__(self, model: str, *, off: str = "") -> None:
        self.model = model
        self.off = off
        self.adopted: list[Entry] = []
        self.before: list[Entry] = []
        self.refused: list[Entry] = []
        self.shared: dict[str, tuple[str, ...]] = {}
        self._changed: list[tuple[str, nn.Module, type]] = []
        self._multiplied: nn.Module | None = None

    def undo(self) -> None:
        """Restore the former class of every module; calling it twice is harmless.

        Copies of the model made in the meantime stay adopted.

        Raises:
            AdoptionError: something else has changed the classes of modules since (FSDP2 does); all other
                modules are restored.
        """
        if self._multiplied is not None:
            restore(self._multiplied)
            self._multiplied = None
        kept: list[tuple[str, nn.Module, type]] = []
        for place, module, subclass in self._changed:
            former = former_class(subclass)
            if type(module) is subclass and former is not None:
                module.__class__ = former
            elif type(module) is not former:
                kept.append((place, module, subclass))
        self._changed = kept
        if kept:
            place, module, _ = kept[0]
            raise AdoptionError(
                f"{len(kept)} modules of {self.model} no longer have the classes that adopt gave them: "
                f"{place or 'the model'} is a {type(module).__module__}.{type(module).__qualname__} now",
                where="Adoption.undo",
                fix="undo the adoption before the model is sharded or its modules are parametrized",
            )

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        lists = {
            name: [asdict(entry) for entry in getattr(self, name)]
            for name in ("adopted", "before", "refused")
        }
        shared = {module: list(names) for module, names in self.shared.items()}
        return {"model": self.model, "off": self.off, **lists, "shared": shared}

    def rebind(self, module: nn.Module, subclass: type, place: str, routed: tuple[str, ...]) -> str:
        """Set a module's class to ``subclass`` and record it; return why this is impossible, or empty."""
        former = type(module)
        try:
            module.__class__ = subclass
        except TypeError as error:  # incompatible memory layout
            return f"its class cannot be changed: {error}"
        self._changed.append((place, module, subclass))
        self.note(self.adopted, former, place, "", routed)
        return ""

    def multiply(self, model: nn.Module) -> None:
        """Let the linear layers of ``model`` multiply as the setting ``precision`` says, unless they do."""
        if in_force().format and not any(format_of(module) for module in model.modules()):
            adapt(model)
            self._multiplied = model

    def note(
        self, entries: list[Entry], kind: type, place: str, reason: str, routed: tuple[str, ...] = ()
    ) -> None:
        """Add one module to one of the lists."""
        for entry in entries:
            if (entry.kind, entry.module, entry.reason) == (kind.__qualname__, kind.__module__, reason):
                entry.count += 1
                return
        entries.append(Entry(kind.__qualname__, kind.__module__, 1, place, reason, routed))

    def __bool__(self) -> bool:
        return bool(self.adopted)

    def __repr__(self) -> str:
        if self.off:
            return f"{self.model}: not patched, the hook is off ({self.off})"
        modules, classes = sum(entry.count for entry in self.adopted), len(self.adopted)
        lines = [
            f"{self.model}: {_counted(modules, 'module', 's')} of {_counted(classes, 'class', 'es')} adopted"
        ]
        lines += [f"  {_named(entry)}: {', '.join(entry.routed) or 'patched'}" for entry in self.adopted]
        lines += [f"  {_named(entry)}: {entry.reason}" for entry in self.before]
        left = [f"  {_named(entry)}, {entry.first or 'the model'}: {entry.reason}" for entry in self.refused]
        left += [
            f"  {', '.join(names)} of {module}: all models of the module use it"
            for module, names in self.shared.items()
        ]
        lines += ["not adopted:", *left] if left else []
        return printable("\n".join(lines))


def _named(entry: Entry) -> str:
    return f"{entry.kind} x {entry.count}"


def _counted(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
