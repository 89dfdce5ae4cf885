"""Public names of a package that are imported on first use (PEP 562)."""

from __future__ import annotations

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["imported_on_use"]


def imported_on_use(
    package: dict[str, Any], homes: dict[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its globals, which get each name when it is used.
        homes: the module of each name.
    """

    def resolve(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        from importlib import import_module  # 0.8 ms, a third of what activation costs

        package[name] = getattr(import_module(homes[name]), name)
        return package[name]

    return resolve, lambda: sorted({*package, *homes})
