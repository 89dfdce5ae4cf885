"""The outcome for one target module: patched (from where), or left unchanged (why)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any


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
        consult: whether the report has something to do before the module is executed.
    """

    def __init__(  # noqa: PLR0913 - a record, built in three places
        self,
        module: str,
        *,
        patched: bool,
        reason: str = "",
        cache: str = "",
        origin: str = "",
        stored: str | None = None,
        patch_hash: str = "",
        report: Callable[[], Mapping[str, Any]] | None = None,
        consult: bool = False,
    ) -> None:
        self.module = module
        self.patched = patched
        self.reason = reason
        self.cache = cache
        self.origin = origin
        self.stored = stored
        self.patch_hash = patch_hash
        self._read_report = report
        self.consult = consult

    @cached_property
    def report(self) -> Mapping[str, Any]:
        """`PatchReport.to_dict()`, read from the cache on demand; empty when not patched."""
        return self._read_report() if self._read_report else {}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        names = ("module", "patched", "reason", "cache", "origin", "stored", "patch_hash")
        return {**{name: getattr(self, name) for name in names}, "report": dict(self.report)}

    @property
    def state(self) -> str:
        """The outcome as text: ``patched (hit)``, or ``not patched:`` and the reason."""
        return f"patched ({self.cache})" if self.patched else f"not patched: {self.reason}"

    def __repr__(self) -> str:
        return f"<Outcome {self.module}: {self.state}>"
