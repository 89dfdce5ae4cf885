"""Calls of parts of heads."""

from functools import partial

import torch

from tests.kernels.contract import Case, Refusal

#: Batch, heads, positions, and the widths of both parts.
SIZES = [
    (2, 3, 5, 8, 4), (2, 3, 5, 7, 5), (1, 4, 3, 16, 16), (2, 3, 0, 8, 4), (0, 3, 5, 8, 4), (2, 1, 1, 4, 2), (1, 2, 700, 4, 1),
    (2, 3, 5, 0, 4), (1, 3, 2, 130, 70),
]  # fmt: skip
#: Widths of DeepSeek's heads, of smaller ones, and odd ones.
WIDTHS = [(128, 64), (192, 64), (64, 32), (448, 64), (7, 5), (1024, 1)]
#: The parts, apart from those of an expanded key.
NAMES = ("first_part", "second_part")


def parts(size, dtype, others):
    *shape, first, second = size
    made = (torch.randn(*shape, width).to(dtype) for width in (first, second))
    return dict(zip(NAMES, made, strict=True))


def whole(size, dtype, others):
    *shape, first, second = size
    return {"x": torch.randn(*shape, first + second).to(dtype), "first": first}


def joined(function, first, second, *others):
    return function((first, second), *(others or (-1, torch.cat)))


def split(function, x, first, *others):
    return function(x, [first, x.shape[-1] - first], *(others or (-1, torch.split)))


_CASE = partial(
    Case, sizes=SIZES, batch=(64, 2, 3, 8, 4), deep=(2, 3, 4, 6, 2), exact=("triton",),
    gpu=[(2, 4, 70, *widths) for widths in WIDTHS], gpu_dtypes=(torch.bfloat16, torch.float32),
)  # fmt: skip
CASES = {
    "joined": _CASE(parts, rows=NAMES, call=joined, rule=joined),
    "split": _CASE(
        whole,
        rows=("x",),
        call=split,
        rule=split,
        unlike={
            ("operators", "triton"): "views are no operator's result; the gradient is joined's",
            ("watched", "triton"): "views are no operator's result",
            ("without", "triton"): "a view of a leaf says that it requires a gradient, as torch.split's do",
        },
    ),
}
REFUSED = [
    Refusal("not the last of four dimensions", {"first_part": torch.ones(3, 5, 8)}, ["joined"], ["triton"]),
    Refusal("differ in dtype", {"first_part": torch.ones(2, 3, 5, 8).half()}, ["joined"], ["triton"]),
    Refusal("differ in dtype", {"second_part": torch.ones(2, 3, 4, 4)}, ["joined"], ["triton"]),
    Refusal("does not support", {"x": torch.ones(2, 3, 5, 12).double()}, ["split"], ["triton"]),
    Refusal("not the last of four dimensions", {"x": torch.ones(3, 5, 12)}, ["split"], ["triton"]),
    Refusal("not the last of four dimensions", {"dim": -2, "function": torch.split}, ["split"], ["triton"]),
    Refusal("torch.cat has been replaced", {"dim": -1, "function": torch.concat}, ["joined"], ["triton"]),
    Refusal("torch.split has been replaced", {"dim": -1, "function": torch.chunk}, ["split"], ["triton"]),
    Refusal("wider than 1024", {"x": torch.ones(2, 3, 5, 1100)}, ["split"], ["triton"]),
]  # fmt: skip
