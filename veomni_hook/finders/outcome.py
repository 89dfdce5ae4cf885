"""The outcome for one target module: patched (from where), or left unchanged (why); and all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

from veomni_hook.printable import printable

#: Reason why a module has no patched form although nothing is wrong.
NOTHING = "no patch applies"


@dataclass(eq=False, repr=False, kw_only=True)
class Outcome:
    """What the hook did with one module.

    Attributes:
        module: the module's name.
        patched: whether the patched source runs.
        reason: why not, or why the cache was missed; empty for an ordinary hit.
        cache: `hit`, `miss` (patched and published), `memory` (patched, not stored) or `` (not patched).
        origin: the upstream file.
        stored: the patched file; None when it exists in memory only.
        patch_hash: identifies the patched form; empty when not patched.
        read_report: returns the report.
        consult: whether the report has something to do before the module is executed.
        text: the patched text if it is not stored.
        code: its code if it is stored.
    """

    module: str
    patched: bool
    reason: str = ""
    cache: str = ""
    origin: str = ""
    stored: str | None = None
    patch_hash: str = ""
    read_report: Callable[[], Mapping[str, object]] = dict
    consult: bool = False
    text: str | None = None
    code: CodeType | None = None

    @cached_property
    def report(self) -> Mapping[str, Any]:
        """`PatchReport.to_dict()`, read from the cache on demand; empty when not patched."""
        return self.read_report()

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        names = ("module", "patched", "reason", "cache", "origin", "stored", "patch_hash")
        return {**{name: getattr(self, name) for name in names}, "report": dict(self.report)}

    @property
    def state(self) -> str:
        """The outcome as text: ``patched (hit)``, or ``not patched:`` and the reason."""
        return f"patched ({self.cache})" if self.patched else f"not patched: {self.reason}"

    def __repr__(self) -> str:
        return printable(f"<Outcome {self.module}: {self.state}>")


@dataclass(eq=False, repr=False)
class Status:
    """What `Handle.status()` returns.

    Attributes:
        active: whether the handle's activation is in force.
        modules: the outcome of every target module that was imported or looked for, by name.
    """

    active: bool
    modules: Mapping[str, Outcome]

    def to_dict(self) -> dict[str, object]:
        """Return both fields as JSON-ready values."""
        return {
            "active": self.active,
            "modules": {name: outcome.to_dict() for name, outcome in self.modules.items()},
        }

    def __repr__(self) -> str:
        lines = [f"veomni_hook: {'active' if self.active else 'inactive'}"]
        lines += [f"  {outcome.module}: {outcome.state}" for outcome in self.modules.values()]
        return printable("\n".join(lines))
