"""The files in `kernels/` that idioms may read: one rule for the idioms and the cache key.

An op's table of variants names the formulas, and its reference has them as patterns. Their contents determine
what an idiom recognises, and therefore the patched text. No other file there affects the text.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing costs 5 ms to import; type checkers treat this name as true
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

__all__ = ["PATTERN_FILES", "combinations", "pattern_file", "pattern_source"]

#: The names of these files in an op's folder.
PATTERN_FILES = frozenset(("reference.py", "spellings.py", "variants.py"))


def pattern_file(op: str, name: str = "reference.py") -> str:
    """Return the path of an op's pattern file, relative to the package's root."""
    return f"kernels/{op}/{name}"


def pattern_source(path: str) -> str:
    """Return the text of a pattern file.

    Raises:
        ValueError: the file has another place or name, so the cache key would not include it.
    """
    _, op, name = ("//" + path).rsplit("/", 2)
    if name not in PATTERN_FILES or path != pattern_file(op, name):
        raise ValueError(f"{path} is not a pattern file, which are {', '.join(sorted(PATTERN_FILES))}")
    # Only a cache miss reads patterns; a hit imports this module for the names.
    from importlib.resources import files

    return files("veomni_hook").joinpath(path).read_text("utf-8")


def combinations(axes: Iterable[Mapping[str, Mapping[str, object]]]) -> dict[str, dict[str, Any]]:
    """Return what every combination of axes means, by its name.

    Args:
        axes: for each, its values: a text with ``{}`` for the name of the axes before it (none in the first),
            and what it means, which may replace what an axis before it meant.
    """
    found: dict[str, dict[str, Any]] = {"": {}}
    for axis in axes:
        found = {
            text.format(name): {**before, **meant}
            for name, before in found.items()
            for text, meant in axis.items()
        }
    return found
