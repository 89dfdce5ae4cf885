"""Combinations of axes without a row in the table are variants like those with one."""

import pytest
import torch

from tests.kernels import declared
from tests.kernels.matching import assert_matches
from tests.kernels.moe_experts.backends import BACKENDS
from tests.kernels.moe_experts.formulas import GATES, Case, inputs, loop
from veomni_hook.errors import KernelError
from veomni_hook.kernels.moe_experts import reference
from veomni_hook.kernels.moe_experts.variants import LAYOUTS, OP
from veomni_hook.kernels.selection.registry import registry

COMBINATIONS = [
    "biased_gated_clamped_not_transposed",
    "biased_interleaved_gated_clamped_after_float32",
    "interleaved_gated_float32_product_transposed",
    "biased_ungated",
    "biased_gated_jointly_normalised",
]


@pytest.fixture(autouse=True)
def _restored():
    torch.manual_seed(3)
    with registry.restored():
        yield


@pytest.mark.parametrize("gate", GATES)
def test_every_combination_is_its_formula(gate):
    names = [name for name, layout in LAYOUTS.items() if layout.gate == gate]
    for name in names:
        case = Case(name)
        operands = inputs(case, torch.bfloat16)
        assert torch.equal(reference.of(name)(*operands, *case.rest), loop(case, *operands)), name
    assert len(names) == 32


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
    case = Case(name)
    operands = [each.to(BACKENDS[backend].device) for each in inputs(case)]
    assert declared.refusal("moe_experts", name, backend)(None, *operands, *case.rest) is None
    sides = declared.pair("moe_experts", name, backend)
    assert_matches(*(lambda *given, f=f: f(*given, *case.rest) for f in sides), operands)


@pytest.mark.parametrize(
    "name", ["biased", "gated_biased", "interleaved_interleaved_gated", "transposed_gated"]
)
def test_a_name_that_no_combination_has_is_none(name):
    with pytest.raises(KernelError, match=f"op 'moe_experts' has no variant '{name}'"):
        registry.check("moe_experts", name)
