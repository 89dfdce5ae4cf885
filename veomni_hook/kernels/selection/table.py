"""How ``kernels/<op>/variants.py`` declares an op: one table, ``VARIANTS``, with a row a variant.

A kernel is written once for all variants of its `backend`: in a code reference ``{variant}`` stands for the
variant's name and ``{reference}`` for its reference. Modules may be relative to the op's folder, as in an
import: ``.triton:{variant}``, ``..shared.recompute:recomputed({reference})``. `op` fills these in.

Recognisers read the names in the table as text (`veomni_hook.patterns`), so it is a literal dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import resolve_name
from typing import Any

from veomni_hook.accelerator import TYPES
from veomni_hook.kernels.selection.declaration import (
    Kernel,
    Op,
    Requirement,
    Variant,
)

__all__ = ["ANYWHERE", "LIGER", "RECOMPUTED", "TRITON", "backend", "completed", "op"]

#: A `Kernel` for rows: of the op and the variant that list it.
backend = partial(Kernel, "", "")
#: For `Op.invariant`: of functions of single numbers, of matrix products, or of other ops' rows; or no rows.
ANYWHERE = ("cpu", *TYPES)
#: The formula itself; its backward recomputes it, so that only the operands are saved.
RECOMPUTED = "..shared.recompute:recomputed({reference})"
#: What our Triton kernels need, and those of liger-kernel.
TRITON = Requirement(devices=("cuda",), min_capability=(8, 0), triton=True)
LIGER = Requirement(devices=("cuda",), triton=True, distributions=("liger_kernel",))


def op(
    name: str,
    rows: Mapping[str, Variant],
    *,
    parts: tuple[str, ...] = (),
    invariant: tuple[str, ...] = (),
    **codes: str,
) -> Op:
    """Return the `Op` that a table declares, with complete references; ``codes`` are its other fields."""
    variants = {variant: completed(name, variant, row) for variant, row in rows.items()}
    return Op(name, variants, parts=parts, invariant=invariant, **_complete(name, codes, {}))


def completed(op: str, variant: str, row: Variant) -> Variant:
    """Return a row of a table with complete references."""
    names = {"variant": variant}
    names["reference"] = _code(op, row.reference, names)
    kernels = []
    for kernel in row.kernels:
        codes = {"load": kernel.load, "refuses": kernel.refuses, "loses": kernel.loses}
        kernels.append(replace(kernel, op=op, variant=variant, **_complete(op, codes, names)))
    rules = _complete(op, {"refuses": row.refuses, "asks": row.asks, "settles": row.settles}, names)
    return replace(row, reference=names["reference"], kernels=tuple(kernels), **rules)


def _complete(op: str, codes: Mapping[str, str | None], names: Mapping[str, str]) -> dict[str, Any]:
    return {key: _code(op, code, names) for key, code in codes.items() if code is not None}


def _code(op: str, reference: str, names: Mapping[str, str]) -> str:
    """A code reference with the names filled in, and with its module's full name."""
    module, colon, attribute = reference.partition(":")
    if module.startswith("."):
        module = resolve_name(module, f"veomni_hook.kernels.{op}")
    return (module + colon + attribute).format_map(names)
