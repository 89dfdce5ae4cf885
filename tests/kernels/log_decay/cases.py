"""Calls of log_decay: one decay a head, or one a channel, with and without a bound."""

import torch

from tests.kernels.contract import DEVICE, Case, in_order

#: torch's sigmoid on a CPU computes what does not fill its vectors by another formula: rows are multiples of these.
WHOLE = 64
#: The interpreter cuts bfloat16 off: of a sigmoid near 1, that is much of what is left to 1.
CUT_OFF = {} if DEVICE == "cuda" else {("triton", torch.bfloat16): 4e-2}

SIZES = [(2, 9, 6), (2, 70, 6), (1, 1, 32), (3, 33), (2, 0, 4), (1, 5, 1)]
#: Heads of usual and odd numbers.
GPU = [(2, 70, heads) for heads in (16, 32, 64, 6, 130)]
#: The second has several blocks of columns, the third several of rows, the fourth more than one step adds up.
CHANNELS = [(2, 3, 3, 5), (1, 2, 9, 128), (2, 35, 2, 8), (1, 140, 1, 128), (2, 0, 2, 4), (1, 1, 1, 1)]


def of_heads(variant, size, dtype, others):
    made = {"a": 3 * torch.randn(size), "b": 3 * torch.randn(size)}
    made = {name: value.to(dtype) for name, value in made.items()}
    made |= {name: torch.randn(size[-1:]).to(others) for name in ("log_rate", "bias")}
    return in_order("log_decay", variant, made)


def of_channels(variant, size, dtype, others):
    shape, lower = size
    made = {
        "x": (3 * torch.randn(shape)).to(dtype),
        "log_rate": (torch.randn(1, 1, shape[2], 1) / 2).to(others),
        "bias": (torch.randn(shape[2] * shape[3]) / 2).to(others),
        "dtype": dtype if variant == "channels_rounded_rate" else None,
        "bounded": lower is not None,
        "lower": lower,
    }
    return in_order("log_decay", variant, made)


def case(variant):
    if variant.startswith("channels"):
        sizes = [(shape, lower) for lower in (None, -5.0) for shape in CHANNELS]
        return Case(
            lambda *of: of_channels(variant, *of),
            sizes,
            batch=((64, 1, 2, WHOLE), -5.0),
            gpu=[((2, 70, *heads), lower) for heads in ((32, 128), (3, 5)) for lower in (None, -5.0)],
            rows=("x",),
            rounds=0.05,
        )
    beside = variant == "softplus_and_sigmoid"
    rows, rereads = ("a", "b") if beside else ("a",), {"triton": (0,), "torch": (0,)} if beside else {}
    return Case(
        lambda *of: of_heads(variant, *of), SIZES, batch=(64, 2, WHOLE), gpu=GPU, rows=rows, rounds=0.05,
        rereads=rereads, tolerance=CUT_OFF if beside else {},
    )  # fmt: skip
