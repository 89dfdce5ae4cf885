"""Results of the store: `Hit`, `Unpatched`, `Miss` for a lookup, `Hit` or `NotStored` for a publication.

Plain classes: dataclasses would cost every first import of a target up to 10 ms.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType
    from typing import Any

__all__ = ["Hit", "Miss", "NotStored", "Unpatched"]


class Hit:
    """A stored patched module, checked; its entry is in use until this process ends.

    `code` is compiled with `path`, the stored file's absolute path, as ``co_filename``. `absent` lists the
    configs for modules that were not installed: the name and source module of each. `consult` says whether
    the report has something to do before the module is executed.
    """

    __slots__ = (
        "_report",
        "_text",
        "absent",
        "code",
        "consult",
        "distribution",
        "module",
        "patch_hash",
        "path",
        "version",
    )

    def __init__(  # noqa: PLR0913 - one argument a field, every one by keyword
        self,
        *,
        module: str,
        distribution: str,
        version: str,
        patch_hash: str,
        path: str,
        code: CodeType,
        text: bytes,
        report: bytes,
        absent: Sequence[tuple[str, str]] = (),
        consult: bool = False,
    ) -> None:
        self.module = module
        self.distribution = distribution
        self.version = version
        self.patch_hash = patch_hash
        self.path = path
        self.code = code
        self._text = text
        self._report = report
        self.absent = absent
        self.consult = consult

    def __repr__(self) -> str:
        return f"Hit({self.module!r}, {self.path!r})"

    def source(self) -> str:
        """The stored text, exactly as it was published."""
        return self._text.decode()

    @property
    def report(self) -> dict[str, Any]:
        """The patch report as it was published; a new dict each time."""
        import json

        report: dict[str, object] = json.loads(self._report)
        return report


class Unpatched:
    """It is known that no patch applies to `module`; `absent` as in `Hit`."""

    __slots__ = ("absent", "module")

    def __init__(self, module: str, absent: Sequence[tuple[str, str]] = ()) -> None:
        self.module = module
        self.absent = absent

    def __repr__(self) -> str:
        return f"Unpatched({self.module!r})"


class _Reasoned:
    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason!r})"


class Miss(_Reasoned):
    """Nothing usable is stored; `reason` says what is missing or wrong."""

    __slots__ = ()


class NotStored(_Reasoned):
    """The module could not be stored; `reason` says why. The import continues without the cache."""

    __slots__ = ()
