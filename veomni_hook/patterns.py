"""The files in `kernels/` that idioms read: one list for the recognisers and the cache key.

A table of variants (``variants.py``) names the formulas, and a reference has them as patterns. Their contents
determine what an idiom recognises, and therefore the patched text. No other file there affects the text, and
files that are not listed here cannot be read.
"""

from __future__ import annotations

__all__ = ["PATTERN_FILES", "pattern_file", "pattern_source"]

#: Paths relative to the package's root.
PATTERN_FILES = (
    "kernels/add_rms_norm/variants.py",
    "kernels/attention/reference.py",
    "kernels/attention/variants.py",
    "kernels/gated_mlp/reference.py",
    "kernels/gated_mlp/variants.py",
    "kernels/hyper_connection/reference.py",
    "kernels/index_scores/reference.py",
    "kernels/index_scores/variants.py",
    "kernels/layer_norm/reference.py",
    "kernels/layer_norm/variants.py",
    "kernels/load_balancing_loss/reference.py",
    "kernels/load_balancing_loss/spellings.py",
    "kernels/moe_experts/reference.py",
    "kernels/moe_experts/variants.py",
    "kernels/moe_router/reference.py",
    "kernels/moe_router/variants.py",
    "kernels/qk_norm_rotary/variants.py",
    "kernels/rms_norm/reference.py",
    "kernels/rms_norm/variants.py",
    "kernels/rotary/reference.py",
    "kernels/rotary/variants.py",
    "kernels/row_merge/reference.py",
)


def pattern_file(op: str, name: str = "reference.py") -> str:
    """Return the path of an op's pattern file, as `PATTERN_FILES` lists it."""
    return f"kernels/{op}/{name}"


def pattern_source(path: str) -> str:
    """Return the text of a pattern file.

    Raises:
        ValueError: the file is not listed, so the cache key would not include it.
    """
    if path not in PATTERN_FILES:
        raise ValueError(f"{path} is not a pattern file; add it to veomni_hook.patterns.PATTERN_FILES")
    # Only a cache miss reads patterns; a hit imports this module for the list.
    from importlib.resources import files

    return files("veomni_hook").joinpath(path).read_text("utf-8")
