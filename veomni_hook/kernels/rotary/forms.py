"""The differences between rotary formulas as data: positions of couples, their cos and sin, and the casts.

A couple is two numbers that are rotated together. The members of couple ``i`` are at ``i`` and
``i + couples`` ("halves") or at ``2i`` and ``2i + 1`` ("pairs") of the rotated columns.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

__all__ = [
    "COUPLE",
    "COUPLED_PAIRS",
    "HALVES",
    "PAIRS",
    "ROTATED_HALVES",
    "ROTATED_PAIRS",
    "Form",
    "in_float32",
]

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


#: Halves, pairs, and pairs of which both members use one column of cos and sin.
ROTATED_HALVES = Form()
ROTATED_PAIRS = Form(pairs_in=True, pairs_out=True, table=PAIRS)
COUPLED_PAIRS = ROTATED_PAIRS._replace(table=COUPLE)
#: A form with the input in float32 until the end.
in_float32 = partial(Form._replace, wide=True, together=True, cast=True)
