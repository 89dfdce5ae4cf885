"""The files of `kernels/` that idioms read as patterns: one list, for recognisers and for the cache key.

What an idiom recognises, and so the patched text, follows from their contents. Nothing else there
shapes the text, and what is not listed here cannot be read as a pattern.
"""

from __future__ import annotations

__all__ = ["PATTERN_FILES", "pattern_source"]

#: Paths from the package's root.
PATTERN_FILES = (
    "kernels/gated_mlp/reference.py",
    "kernels/load_balancing_loss/reference.py",
    "kernels/load_balancing_loss/spellings.py",
    "kernels/moe_experts/reference.py",
    "kernels/moe_router/reference.py",
    "kernels/rms_norm/reference.py",
    "kernels/rotary/reference.py",
)


def pattern_source(path: str) -> str:
    """The text of a pattern file.

    Raises:
        ValueError: it is not listed, so that the cache key would not follow it.
    """
    if path not in PATTERN_FILES:
        raise ValueError(f"{path} is no pattern file; add it to veomni_hook.patterns.PATTERN_FILES")
    from importlib.resources import files

    return files("veomni_hook").joinpath(path).read_text("utf-8")
