"""What tells one rotary formula from another, as data: where couples stand, their cos and sin, and the casts.

A couple is the two numbers that turn together. With the number ``i`` of a couple, its members stand at ``i``
and ``i + couples`` ("halves") or ``2i`` and ``2i + 1`` ("pairs") of the rotated columns.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

__all__ = ["FORMS", "Form", "Steps", "steps"]

# Which columns of cos and sin the members of couple i take: both the column i, or those of halves or pairs.
COUPLE, HALVES, PAIRS = range(3)


class Form(NamedTuple):
    """One formula.

    Attributes:
        pairs_in, pairs_out: members are neighbours, not halves apart, in what is read and written.
        table: which columns of cos and sin the members take.
        ratio: rotated columns for each column of cos.
        reach: what is rotated: all of head_dim ("full"), its first columns or its last ones.
        backwards: couples turn the other way.
        wide: the input is cast to float32 first, and the result back.
        together: a gradient's two products are added before they are rounded to the input's dtype; so it is
            where upstream casts the input once. Else each is rounded, and their sum.
        cast: the result has the dtype of the input, whatever the operands promote to.
    """

    pairs_in: bool = False
    pairs_out: bool = False
    table: int = HALVES
    ratio: int = 1
    reach: str = "full"
    backwards: bool = False
    wide: bool = False
    together: bool = False
    cast: bool = False


_HALVES = Form()
_PAIRS = Form(pairs_in=True, pairs_out=True, table=PAIRS)
_COUPLES = _PAIRS._replace(table=COUPLE)
_WIDE = partial(Form._replace, wide=True, together=True, cast=True)

#: By variant of `veomni_hook.kernels.rotary`, or by the one that it leads back to.
FORMS = {
    "half_split": _HALVES,
    "half_split_cast_out": _HALVES._replace(cast=True),
    "half_split_fp32": _WIDE(_HALVES),
    "half_split_reversed": _HALVES._replace(backwards=True),
    "half_split_partial": _HALVES._replace(reach="leading"),
    "half_width_halves": _HALVES._replace(table=COUPLE, ratio=2),
    "half_width_pairs": _COUPLES._replace(ratio=2),
    "pairs": _PAIRS,
    "pairs_fp32": _WIDE(_PAIRS),
    "pairs_partial": _PAIRS._replace(reach="leading"),
    "pairs_repeated": _COUPLES,
    "pairs_repeated_fp32": _COUPLES._replace(wide=True, cast=True),
    "pairs_partial_repeated": _COUPLES._replace(reach="leading"),
    "pairs_trailing_fp32": _COUPLES._replace(ratio=2, reach="trailing", wide=True, cast=True),
    "pairs_to_halves": _COUPLES._replace(pairs_out=False),
    "pairs_to_halves_full_width": _COUPLES._replace(pairs_out=False, table=HALVES),
    "pairs_matrix": _COUPLES._replace(together=True),
    "complex_pairs": _WIDE(_COUPLES._replace(ratio=2)),
}


class Steps(NamedTuple):
    """A form at given dtypes, one direction: what the device code is told.

    Attributes:
        code: pairs_in, pairs_out, table, turned back, columns of sin of the two members swapped; as numbers.
        middle: products and their sum are rounded to it.
        out: the dtype of the result.
    """

    code: tuple[int, int, int, int, int]
    middle: torch.dtype
    out: torch.dtype


def steps(form: Form, x: torch.dtype, table: torch.dtype) -> tuple[Steps, Steps]:
    """How ``x`` turns by ``cos`` and ``sin`` of dtype ``table``, and how the gradient turns back.

    A gradient turns the other way, ``dx1 = dy1*cos1 + dy2*sin2, dx2 = dy2*cos2 - dy1*sin1``, from where
    results stand to where inputs do.
    """
    compute = torch.float32 if form.wide else torch.promote_types(x, table)
    there = (form.pairs_in, form.pairs_out, form.table, form.backwards, False)
    back = (form.pairs_out, form.pairs_in, form.table, not form.backwards, True)
    forward = Steps(_numbers(there), compute, x if form.cast else compute)
    return forward, Steps(_numbers(back), compute if form.together else x, x)


def _numbers(flags: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    pairs_in, pairs_out, table, backwards, swapped = map(int, flags)
    return pairs_in, pairs_out, table, backwards, swapped
