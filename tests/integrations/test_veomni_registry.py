"""Our kernels in VeOmni's registry, bound by name to VeOmni's own slots and compared with its eager code."""

import copy
import logging

import pytest
import torch

pytest.importorskip("veomni")

from veomni.arguments import arguments_types
from veomni.arguments.arguments_types import OpsImplementationConfig
from veomni.ops import kernel_registry
from veomni.ops.config.registry import get_op
from veomni.ops.dispatch import OpSlot
from veomni.ops.kernels import cross_entropy, moe

from tests.integrations.veomni_cases import (
    CASES,
    CONFIG,
    EXPERTS,
    TOLERANCES,
    Case,
    dtypes,
    experts,
    far,
    generated,
    of_module,
    one_plus_rms_norm,
    partial_rotary,
    places,
    results,
    rms_norm,
    rotary,
    routed,
    states,
    swiglu_mlp,
    unweighted_rms_norm,
    vision_rotary,
)
from veomni_hook.errors import KernelError
from veomni_hook.finders.state import STATE
from veomni_hook.integrations.veomni import adapters, register


@pytest.fixture(autouse=True, scope="module")
def registered():
    torch.backends.cuda.matmul.allow_tf32 = False
    return register()


def compared(case, name, dtype):
    case.slot.bind("eager")
    expected = results(case)
    case.slot.bind(name)
    try:
        assert case.slot.use_non_eager_impl
        found = results(case)
    finally:
        case.slot.bind("eager")
    assert far(found, expected) < TOLERANCES[dtype]


@places
@dtypes
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_bound_slot_computes_what_the_eager_code_does(make, name, device, dtype):
    compared(make(device, dtype), name, dtype)


@pytest.mark.parametrize(
    "make", [one_plus_rms_norm, unweighted_rms_norm, swiglu_mlp, rotary, partial_rotary, vision_rotary]
)
def test_in_16_bits_they_round_where_the_eager_code_does(make):
    case = make("cpu", torch.bfloat16)
    case.slot.bind("eager")
    expected = results(case)
    case.slot.bind("veomni_hook_torch")
    assert far(results(case), expected) == 0
    case.slot.bind("eager")


@places
def test_a_limit_of_the_experts_module_is_applied(name, device):
    home = generated("deepseek_v4")
    slot = OpSlot("moe_experts", "standard")
    slot.bind(name)
    case = of_module(
        home.veomni_moe_experts_forward, home.DeepseekV4Experts(CONFIG), device, torch.float32,
        *routed(device, torch.float32),
    )  # fmt: skip
    case.slot.bind("eager")
    found = results(case._replace(function=lambda *inputs: slot(case.module, *inputs)))
    assert far(found, results(case)) < TOLERANCES[torch.float32]


def test_vision_tables_get_their_heads_before_the_last_dimension():
    case = vision_rotary("cpu", torch.float32)
    case = case._replace(inputs=tuple(each[None] for each in case.inputs))
    compared(case, "veomni_hook_torch", torch.float32)


def test_the_comparison_can_fail():
    case = rms_norm("cpu", torch.float32)
    case.slot.bind("eager")
    expected = results(case)
    case.module.variance_epsilon *= 1e4
    assert far(results(case), expected) > TOLERANCES[torch.float32]


@places
@dtypes
def test_the_gated_norm_is_a_module_like_upstreams(name, device, dtype):
    home = generated("qwen3_5")
    slot = OpSlot("rms_norm_gated", "standard")
    slot.bind(name)
    ours = slot(32, eps=1e-5, activation="silu", device=device, dtype=dtype)
    theirs = home.Qwen3_5RMSNormGated(32, eps=1e-5).to(device, dtype)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    inputs = tuple(states(9, 32, device=device, dtype=dtype) for _ in range(2))
    expected, found = (results(Case(slot, module, inputs, module)) for module in (theirs, ours))
    assert far(found, expected) < TOLERANCES[dtype]
    ours.reset_parameters()
    assert ours.weight.eq(1).all() and name in repr(ours)
    with pytest.raises(KernelError, match="the activation 'gelu'"):
        slot(32, activation="gelu")


@places
@pytest.mark.parametrize("limit", [None, 0.5])
def test_the_experts_behind_veomnis_pointer(name, device, limit, monkeypatch):
    monkeypatch.setattr(moe, "_fused_moe_forward", None)
    moe.apply_veomni_fused_moe_patch(name)
    assert moe._fused_moe_forward.__name__ == f"{name}_fused_moe_forward"
    home = generated("deepseek_v4" if limit else "deepseek_v3")
    module = home.DeepseekV4Experts(CONFIG) if limit else home.DeepseekV3NaiveMoe(CONFIG)
    case = of_module(
        home.veomni_moe_experts_forward, module, device, torch.bfloat16, *routed(device, torch.bfloat16)
    )
    compared(case, name, torch.bfloat16)
    gate, up = module.gate_up_proj.detach().chunk(2, dim=1)
    index, weights = case.inputs[1:]
    whole, parts = (
        moe.fused_moe_forward(EXPERTS, weights, index, case.inputs[0], *fc1, module.down_proj, fc12, limit)
        for fc1, fc12 in (((None, None), module.gate_up_proj), ((gate, up), None))
    )
    assert torch.equal(whole, parts)
    with pytest.raises(KernelError, match="no gate and up weights"):
        moe.fused_moe_forward(EXPERTS, weights, index, case.inputs[0], None, up, module.down_proj)


def test_expert_parallelism_is_refused_when_a_slot_is_bound_and_when_it_is_called(monkeypatch):
    from veomni.distributed import parallel_state

    case = experts("cpu", torch.float32)
    case.slot.bind("veomni_hook_torch")
    monkeypatch.setattr(parallel_state.ParallelState, "ep_enabled", True)
    monkeypatch.setattr(parallel_state, "_PARALLEL_STATE", parallel_state.ParallelState())
    for call in (lambda: results(case), lambda: case.slot.bind("veomni_hook_torch")):
        with pytest.raises(KernelError, match="expert parallelism is on"):
            call()
    case.slot.bind("eager")


@pytest.mark.parametrize("op", adapters.LEGACY)
def test_the_older_registry_has_the_names(op):
    for backend in ("torch", "triton", "npu"):
        assert get_op(op).backends[f"veomni_hook_{backend}"].entry == adapters.entry(op, backend)
    with pytest.raises(AttributeError, match="no_such"):
        _ = adapters.no_such


def test_a_norms_forward_reads_either_name_of_its_epsilon():
    case = rms_norm("cpu", torch.float32)
    case.slot.bind("eager")
    expected = case.module(case.inputs[0])
    assert torch.allclose(adapters.rms_norm_torch(case.module, case.inputs[0]), expected)
    case.module.eps = vars(case.module).pop("variance_epsilon")
    assert torch.allclose(adapters.rms_norm_torch(case.module, case.inputs[0]), expected)


FIELDS = sorted({each.field for each in register().kernels})


def test_the_configuration_takes_the_names():
    for name in ("veomni_hook_torch", "veomni_hook_triton", "veomni_hook_npu"):
        config = OpsImplementationConfig(attn_implementation="eager", **dict.fromkeys(FIELDS, name))
        assert {getattr(config, field) for field in FIELDS} == {name}


def test_on_an_npu_the_configuration_takes_those_that_run_there(monkeypatch):
    from veomni.utils import import_utils

    monkeypatch.setattr(import_utils, "is_torch_npu_available", lambda: True)
    names = {**dict.fromkeys(FIELDS, "veomni_hook_torch"), "moe_implementation": "veomni_hook_npu"}
    OpsImplementationConfig(attn_implementation="eager", **names)
    OpsImplementationConfig(attn_implementation="eager", **dict.fromkeys(FIELDS, "veomni_hook_npu"))
    for wrong in (
        {"rms_norm_implementation": "veomni_hook_triton"},
        {"moe_implementation": "veomni_hook_torch"},
    ):
        with pytest.raises(ValueError, match="not supported on Ascend NPU"):
            OpsImplementationConfig(attn_implementation="eager", **{**names, **wrong})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hardware is there")
def test_hardware_that_is_missing_is_veomnis_error():
    for name, needed in (("veomni_hook_triton", "gpu"), ("veomni_hook_npu", "npu")):
        with pytest.raises(RuntimeError, match=f"requires device_type='{needed}'"):
            OpSlot("rms_norm", "standard").bind(name)
        with pytest.raises(RuntimeError, match=f"requires device_type='{needed}'"):
            cross_entropy.install_loss_mapping(name)
        with pytest.raises(KernelError, match=r"cannot use '\w+': needs"):
            moe.apply_veomni_fused_moe_patch(name)
    with pytest.raises(KeyError, match="veomni_hook_torch"):
        OpSlot("rms_norm", "standard").bind("veomni_hook_tritno")


def test_a_second_registration_changes_nothing(registered):
    before = copy.deepcopy(kernel_registry.KERNEL_REGISTRY._specs)
    functions = cross_entropy.install_loss_mapping, moe.apply_veomni_fused_moe_patch
    assert register("torch").kernels == tuple(
        each for each in registered.kernels if each.name.endswith("torch")
    )
    assert register() == registered
    assert {key: list(each) for key, each in kernel_registry.KERNEL_REGISTRY._specs.items()} == {
        key: list(each) for key, each in before.items()
    }
    assert functions == (cross_entropy.install_loss_mapping, moe.apply_veomni_fused_moe_patch)
    assert len(registered.kernels) == 39 and not STATE.handles


def test_a_registration_prints_a_table(registered):
    lines = repr(registered).splitlines()
    assert lines[0] == "registered in VeOmni: veomni_hook_torch, veomni_hook_triton, veomni_hook_npu"
    assert any(
        line.split() == ["moe_implementation", "moe_experts/standard", "moe_experts/gated"] for line in lines
    )
    assert "  veomni.ops.kernels.moe.apply_veomni_fused_moe_patch" in lines


def test_other_names_are_veomnis_own():
    assert cross_entropy.install_loss_mapping("eager") == "CrossEntropy (eager)"
    with pytest.raises(ValueError, match="Unknown cross_entropy_loss_implementation: 'nothing'"):
        cross_entropy.install_loss_mapping("nothing")
    with pytest.raises(ValueError, match="Invalid fused_moe_kernel: 'nothing'"):
        moe.apply_veomni_fused_moe_patch("nothing")


def without_field(monkeypatch):
    monkeypatch.delattr(arguments_types, "_NPU_ALLOWED")
    return "has no '_NPU_ALLOWED'"


def other_signature(monkeypatch):
    monkeypatch.setattr(cross_entropy, "install_loss_mapping", lambda name: name)
    return "install_loss_mapping has no parameter 'impl'"


def no_slot(monkeypatch):
    monkeypatch.delitem(kernel_registry.KERNEL_REGISTRY._specs, ("rms_norm", "standard"))
    return "nothing for op 'rms_norm', variant 'standard'"


def other_spec(monkeypatch):
    monkeypatch.setattr(kernel_registry, "KernelSpec", int)
    return "KernelSpec has no field 'name'"


@pytest.mark.parametrize("change", [without_field, other_signature, no_slot, other_spec])
def test_another_veomni_is_an_error_and_nothing_is_registered(change, monkeypatch):
    registry = copy.deepcopy(kernel_registry.KERNEL_REGISTRY)
    for bucket in registry._specs.values():
        for name in [each for each in bucket if each.startswith("veomni_hook")]:
            del bucket[name]
    monkeypatch.setattr(kernel_registry, "KERNEL_REGISTRY", registry)
    said = change(monkeypatch)
    with pytest.raises(KernelError, match=said) as caught:
        register()
    assert "is not the VeOmni that this integration knows" in caught.value.what
    assert not any("veomni_hook" in name for bucket in registry._specs.values() for name in bucket)


def test_calls_that_a_kernel_refuses_run_its_formula_with_one_warning(caplog):
    case = rms_norm("cpu", torch.float64)
    case.slot.bind("eager")
    expected = results(case)
    case.slot.bind("veomni_hook_torch")
    with caplog.at_level(logging.WARNING, "veomni_hook.kernels"):
        found = results(case)
        results(case)
    case.slot.bind("eager")
    assert far(found, expected) < 1e-6
    said = [each.getMessage() for each in caplog.records if each.name == "veomni_hook.kernels"]
    assert len(said) == 1 and "its formula in PyTorch instead of torch" in said[0]
    caplog.clear()


def test_an_unweighted_norm_has_no_weight():
    slot = unweighted_rms_norm("cpu", torch.float32).slot
    slot.bind("veomni_hook_torch")
    with pytest.raises(KernelError, match="called with a weight"):
        slot(torch.randn(2, 3), torch.ones(3), 1e-6)
    slot.bind("eager")


@places
def test_bound_slots_compile_into_one_graph(name, device):
    # On a GPU, torch has no grouped products in float32.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for make in CASES:
        case = make(device, dtype)
        case.slot.bind(name)
        torch._dynamo.reset()
        compiled = torch.compile(case.function, fullgraph=True, backend="aot_eager")
        try:
            assert far(results(case._replace(function=compiled)), results(case)) < TOLERANCES[dtype]
        finally:
            case.slot.bind("eager")


@pytest.fixture
def any_hardware(monkeypatch):
    """VeOmni, and our own requirement, take a CPU for a GPU or an Ascend device."""
    monkeypatch.setattr(kernel_registry.HardwareRequirement, "is_satisfied", lambda self: True)
    monkeypatch.setattr("veomni_hook.integrations.veomni.backend.unmet", lambda kernel: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled and run on the GPU by the tests above")
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_triton_kernels_take_these_calls_in_their_interpreter(make, any_hardware):
    compared(make("cpu", torch.float32), "veomni_hook_triton", torch.float32)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_kernels_for_ascend_take_these_calls_with_the_double_of_torch_npu(make, any_hardware, called):
    compared(make("cpu", torch.float32), "veomni_hook_npu", torch.float32)
    assert called or make is unweighted_rms_norm  # for which torch_npu has no operator
