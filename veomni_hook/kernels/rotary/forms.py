"""The differences between rotary formulas as data: positions of couples, their cos and sin, and the casts.

A couple is two numbers that are rotated together. The members of couple ``i`` are at ``i`` and
``i + couples`` ("halves") or at ``2i`` and ``2i + 1`` ("pairs") of the rotated columns.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

__all__ = ["FORMS", "Form", "Steps", "steps"]

# Which columns of cos and sin the members of couple i use: both column i, or those of halves or pairs.
COUPLE, HALVES, PAIRS = range(3)


class Form(NamedTuple):
    """One formula.

    Attributes:
        pairs_in, pairs_out: members are neighbours, not half the width apart, in input and output.
        table: which columns of cos and sin the members use.
        ratio: rotated columns per column of cos.
        reach: the rotated columns: all of head_dim ("full"), its first columns or its last ones.
        backwards: couples rotate in the other direction.
        wide: the input is cast to float32 first, and the result back.
        together: a gradient's two products are summed before rounding to the input's dtype, as when upstream
            casts the input once. Otherwise each product and their sum are rounded.
        cast: the result has the input's dtype, regardless of type promotion.
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

#: By variant of `veomni_hook.kernels.rotary`, or by the variant that it reduces to.
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
    """The device code's parameters for a form at given dtypes, in one direction.

    Attributes:
        code: as numbers: pairs_in, pairs_out, table, inverse rotation, the members' sin columns swapped.
        middle: the dtype to which products and their sum are rounded.
        out: the dtype of the result.
    """

    code: tuple[int, int, int, int, int]
    middle: torch.dtype
    out: torch.dtype


def steps(form: Form, x: torch.dtype, table: torch.dtype) -> tuple[Steps, Steps]:
    """Steps that rotate ``x`` by ``cos`` and ``sin`` of dtype ``table``, and that rotate the gradient back.

    A gradient rotates in the other direction, ``dx1 = dy1*cos1 + dy2*sin2, dx2 = dy2*cos2 - dy1*sin1``, from
    the positions of results to those of inputs.
    """
    compute = torch.float32 if form.wide else torch.promote_types(x, table)
    there = (form.pairs_in, form.pairs_out, form.table, form.backwards, False)
    back = (form.pairs_out, form.pairs_in, form.table, not form.backwards, True)
    forward = Steps(_numbers(there), compute, x if form.cast else compute)
    return forward, Steps(_numbers(back), compute if form.together else x, x)


def _numbers(flags: tuple[int, ...]) -> tuple[int, int, int, int, int]:
    pairs_in, pairs_out, table, backwards, swapped = map(int, flags)
    return pairs_in, pairs_out, table, backwards, swapped
