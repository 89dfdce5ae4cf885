"""The releases of transformers and torch that this package supports, and those that its tests run on.

Nothing else states them: nox, the scripts that write badges and tables, `doctor` and the banner read this
file, and tests compare pyproject.toml, the constraints and the README with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["SUPPORTED", "TESTED", "installed", "minor", "newer_than_tested", "span"]

#: The supported releases of transformers: from the first, below the second.
SUPPORTED = ((5, 2), (6, 0))
#: The releases that the tests run on, the oldest first.
TESTED = {
    "transformers": ("5.2.0", "5.9.0", "5.17.0", "5.23.0", "5.24.0"),
    "torch": ("2.11.0", "2.13.0", "2.14.1", "2.15.0"),
}


def installed(distribution: str) -> str | None:
    """Return the installed release of a distribution, without importing it; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def newer_than_tested(versions: Mapping[str, str]) -> str:
    """Return which of these versions, by distribution, are newer than what was tested; empty if none is."""
    return "; ".join(
        f"{name} {versions[name]} is newer than what was tested, {span(name)}"
        for name, tested in TESTED.items()
        if name in versions and minor(versions[name]) > minor(tested[-1])
    )


def span(name: str) -> str:
    """Return the first and the last tested release of a distribution, as ``5.2 to 5.24``, or the only one."""
    return " to ".join(dict.fromkeys(".".join(map(str, minor(TESTED[name][at]))) for at in (0, -1)))


def minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, which may be a release candidate."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
