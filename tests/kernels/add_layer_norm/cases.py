"""Calls of add_layer_norm."""

from functools import partial

from tests.kernels.contract import Case
from tests.kernels.nn_layer_norm.cases import GPU, ONE_DTYPE, SIZES, called, operands

ROWS = ("residual", "hidden_states")
CASES = {
    "rounded_once": Case(
        partial(operands, ROWS),
        SIZES,
        batch=((64, 130), 2),
        gpu=GPU,
        deep=((2, 3, 4, 6), 2),
        rows=ROWS,
        call=partial(called, 2),
        rule=partial(called, 2),
        rereads={"triton": (0,)},
        unlike=ONE_DTYPE,
    )
}
