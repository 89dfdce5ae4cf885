"""Kernels of hyper-connections against the formulas: outputs and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.contract import call_of
from tests.kernels.hyper_connection.cases import NORM, Norm
from tests.kernels.matching import DEVICE, TOLERANCE
from veomni_hook.kernels.hyper_connection import rules

OP = "hyper_connection"


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def test_one_iteration(backend):
    call = call_of(OP, "sinkhorn", backend, (4, (1, 3), 8), iterations=lambda _: 1)
    call.matches(exact=False, tolerance=TOLERANCE[torch.float32] * (4 if DEVICE == "cuda" else 1))


def test_twenty_iterations_give_rows_and_columns_that_sum_to_one():
    call = call_of(OP, "sinkhorn", "triton", (4, (1, 5), 8), iterations=lambda _: 20, eps=lambda _: 1e-6)
    _, comb, _ = call.ours(*call.tensors)
    for dim in (-1, -2):
        torch.testing.assert_close(comb.sum(dim), torch.ones_like(comb[..., 0]), atol=1e-3, rtol=0)


class _Hooked(Norm):
    pass


def operands(**changed: Any) -> dict[str, Any]:
    given = {
        "hidden_streams": values(1, 2, 4, 8), "norm": NORM, "norm_class": Norm, "fn": values(24, 32),
        "base": values(24), "scale": values(3), "streams": 4, "iterations": 2, "eps": 1e-6,
    }  # fmt: skip
    return {**given, **changed}


def hooked() -> Norm:
    norm = Norm()
    norm.register_forward_hook(lambda *_: None)
    return norm


REFUSED = {
    "a subclass of the norm": ({"norm": _Hooked()}, "not the recognised class"),
    "a hook": ({"norm": hooked()}, "has hooks"),
    "streams of three dimensions": ({"hidden_streams": values(2, 4, 8)}, "do not have the shape"),
    "no tokens": ({"hidden_streams": values(1, 0, 4, 8)}, "do not have the shape"),
    "integers": ({"base": torch.zeros(24, dtype=torch.int64, device=DEVICE)}, "floating-point"),
    "another number of streams": ({"streams": 2}, "number of streams"),
    "no iteration": ({"iterations": 0}, "positive integer"),
    "other parameters": ({"fn": values(24, 31)}, "recognised shapes"),
    "a tensor as eps": ({"eps": torch.ones(())}, "eps is not a float"),
    "a device": ({"scale": torch.zeros(3, device="meta")}, "different devices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_run_upstreams_code(name):
    changed, reason = REFUSED[name]
    assert rules.refuses(None, **operands()) is None
    assert reason in str(rules.refuses(None, **operands(**changed)))


def test_autocast_runs_upstreams_code():
    with torch.autocast(DEVICE, torch.bfloat16):
        assert "autocast" in str(rules.refuses(None, **operands()))


def test_mixtures_that_run_upstreams_code():
    given = values(1, 2, 4), values(1, 2, 4, 4), values(1, 2, 8), values(1, 2, 4, 8)
    assert rules.refuses_mix(None, *given, torch.float32) is None
    assert "one dtype" in str(rules.refuses_mix(None, *given, torch.float16))
    assert "another shape" in str(
        rules.refuses_mix(None, *given[:2], values(1, 2, 9), given[3], torch.float32)
    )


def test_what_triton_does_not_support():
    assert rules.unsupported(values(1, 2, 4, 8)) is None
    assert "3 streams" in str(rules.unsupported(values(1, 2, 3, 8)))
    assert "float64" in str(rules.unsupported(values(1, 2, 4, 8, dtype=torch.float64)))


@pytest.mark.skipif(DEVICE == "cpu", reason="takes half a minute in the interpreter")
@pytest.mark.parametrize("variant", ["sinkhorn", "collapse", "mix"])
def test_bfloat16_at_the_size_of_a_model(variant):
    call_of(OP, variant, "triton", (4, (1, 512), 4096), torch.bfloat16).matches()
