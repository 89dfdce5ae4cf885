"""Combinations of axes without a row in the table are variants like those with one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from tests.kernels import declared
from tests.kernels.matching import assert_matches
from tests.kernels.moe_experts.backends import BACKENDS
from tests.kernels.moe_experts.formulas import (
    CASES,
    EXPERTS,
    LIMIT,
    inputs,
    loop,
    scaled,
)
from veomni_hook.errors import KernelError
from veomni_hook.kernels.moe_experts import reference
from veomni_hook.kernels.moe_experts.variants import LAYOUTS, OP
from veomni_hook.kernels.selection.registry import registry

#: Each with what its operands are after the weights.
COMBINATIONS = {
    "biased_gated_clamped_not_transposed": (silu, LIMIT),
    "biased_interleaved_gated_clamped_after_float32": (silu, LIMIT),
    "interleaved_gated_float32_product_transposed": (silu,),
    "biased_ungated": (silu,),
    "biased_gated_jointly_normalised": (lambda gate, up: gate.sigmoid() * up, scaled),
}
BY_GATE = {LAYOUTS[name].gate: case for name, case in reversed(CASES.items()) if not LAYOUTS[name].biased}


def stored(name, gate_up, down):
    """Weights of the plain layout in the order of another one, with biases of zeros where it has them."""
    layout = LAYOUTS[name]
    if layout.interleaved and layout.gate != "activation":
        gate_up = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1, 2)
    weights = [each.transpose(1, 2).contiguous() if layout.transposed else each for each in (gate_up, down)]
    biases = [each.new_zeros(EXPERTS, each.shape[1]) for each in (gate_up, down)]
    return [weights[0], biases[0], weights[1], biases[1]] if layout.biased else weights


@pytest.fixture(autouse=True)
def _restored():
    with registry.restored():
        yield


@pytest.mark.parametrize("gate", BY_GATE)
def test_the_storage_of_weights_is_all_that_a_layout_changes(gate):
    case = BY_GATE[gate]
    rows, ids, routing, *weights = inputs(case)
    expected = loop(case, rows, ids, routing, *weights)
    names = [name for name, each in LAYOUTS.items() if each.gate == gate and not each.normalised]
    for name in names:
        result = reference.of(name)(rows, ids, routing, *stored(name, *weights), *case.rest)
        torch.testing.assert_close(result, expected, msg=name)
    assert len(names) == 16


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_kernels_compute_the_reference(backend, name, request):
    if backend == "triton":
        pytest.importorskip("triton")
    if backend == "npu":
        request.getfixturevalue("operators")
    assert name not in OP.variants
    registry.check("moe_experts", name)
    if not LAYOUTS[name].fused and backend != "torch":
        assert name not in declared.kernels("moe_experts", backend)
        return
    torch.manual_seed(3)
    case, rest = BY_GATE[LAYOUTS[name].gate], COMBINATIONS[name]
    rows, ids, routing, *weights = inputs(case)
    operands = [rows, ids, routing, *stored(name, *weights)]
    if LAYOUTS[name].biased:
        operands[4], operands[6] = (torch.randn_like(each) for each in (operands[4], operands[6]))
    operands = [each.to(BACKENDS[backend].device) for each in operands]
    assert declared.refusal("moe_experts", name, backend)(None, *operands, *rest) is None
    kernel, formula = declared.pair("moe_experts", name, backend)
    assert_matches(lambda *given: kernel(*given, *rest), lambda *given: formula(*given, *rest), operands)


@pytest.mark.parametrize(
    "name", ["biased", "gated_biased", "interleaved_interleaved_gated", "transposed_gated"]
)
def test_a_name_that_no_combination_has_is_none(name):
    with pytest.raises(KernelError, match=f"op 'moe_experts' has no variant '{name}'"):
        registry.check("moe_experts", name)
