"""A form's steps at given dtypes, as the device code's parameters."""

from __future__ import annotations

from typing import NamedTuple

import torch

from veomni_hook.kernels.rotary.forms import Form

__all__ = ["Steps", "steps"]


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
