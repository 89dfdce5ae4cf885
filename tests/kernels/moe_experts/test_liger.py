"""Liger's experts, where it is installed: compiled on a GPU only."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.matching import DEVICE, assert_matches
from tests.kernels.moe_experts.formulas import CASES, SENTINEL, inputs
from veomni_hook.kernels.moe_experts import reference

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

from veomni_hook.kernels.moe_experts.liger import gated, refuses


@pytest.mark.skipif(DEVICE == "cpu", reason="these kernels of Liger do not run in the interpreter")
def test_equals_the_reference():
    x, ids, routing, *weights = (each.to(DEVICE) for each in inputs(CASES["gated"]))
    assert (ids == SENTINEL).any()
    sides = [
        lambda x, routing, *weights, home=home: home(x, ids, routing, *weights, functional.silu)
        for home in (gated, reference.of("gated"))
    ]
    assert_matches(*sides, [x, routing, *weights], tolerance=2e-2)  # its products are in tf32


def test_refuses():
    operands = [*inputs(CASES["gated"]), functional.silu]
    assert refuses(None, *operands) is None
    for number, change, reason in (
        (5, lambda _: functional.gelu, "gelu"),
        (5, lambda _: torch.tanh, "tanh"),
        (0, lambda x: x[None], "hidden states [1,"),
        (0, lambda x: x.half(), "float16"),
    ):
        changed = [*operands]
        changed[number] = change(changed[number])
        assert reason in refuses(None, *changed)
    empty = [*(each[:0] for each in operands[:3]), *operands[3:]]
    assert "no expert ids" in refuses(None, *empty)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in refuses(None, *operands)
