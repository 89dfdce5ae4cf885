"""Our kernels in VeOmni's registry, bound by name to VeOmni's own slots and compared with its eager code."""

from __future__ import annotations

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
from veomni.ops.kernels.cross_entropy import ForCausalLMLoss, ForSequenceClassificationLoss
from veomni.ops.kernels.load_balancing_loss.eager import load_balancing_loss_pytorch

from tests.integrations.veomni_cases import (
    CASES,
    EXPERTS,
    Case,
    far,
    generated,
    results,
    states,
    unweighted_rms_norm,
)
from tests.integrations.veomni_cases import rms_norm as norm_case
from veomni_hook.errors import KernelError
from veomni_hook.finders.state import STATE
from veomni_hook.integrations.veomni import entries, register

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
PLACES = [("veomni_hook_torch", "cpu")]
if torch.cuda.is_available():
    PLACES += [("veomni_hook_torch", "cuda"), ("veomni_hook_triton", "cuda")]
places = pytest.mark.parametrize(("name", "device"), PLACES)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
WEIGHT = (53, 32)


@pytest.fixture(autouse=True, scope="module")
def registered():
    torch.backends.cuda.matmul.allow_tf32 = False
    return register()


@pytest.fixture(autouse=True)
def nothing_refused(caplog: pytest.LogCaptureFixture):
    """No call of a test here falls back to the formula, unless the test says so."""
    yield
    said = [each.getMessage() for each in caplog.records if each.name == "veomni_hook.kernels"]
    assert not said


def compared(case: Case, name: str, dtype: torch.dtype) -> None:
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
def test_a_bound_slot_computes_what_the_eager_code_does(make, name, device, dtype) -> None:
    compared(make(device, dtype), name, dtype)


def test_the_comparison_can_fail() -> None:
    case = norm_case("cpu", torch.float32)
    case.slot.bind("eager")
    expected = results(case)
    case.module.variance_epsilon *= 1e4
    assert far(results(case), expected) > TOLERANCES[torch.float32]


@places
@dtypes
def test_the_gated_norm_is_a_module_like_upstreams(name, device, dtype) -> None:
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
@pytest.mark.parametrize("mask", ["none", "some", "nothing"])
def test_the_load_balancing_loss(name, device, mask) -> None:
    slot = OpSlot("load_balancing_loss", "standard")
    slot.bind(name)
    kept = {"none": None, "some": torch.tensor([[1, 1, 0], [1, 0, 0]]), "nothing": torch.zeros(2, 3)}[mask]
    kept = None if kept is None else kept.to(device)
    found = []
    for function in (load_balancing_loss_pytorch, slot):
        torch.manual_seed(0)
        layers = tuple(
            torch.randn(6, EXPERTS, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
        )
        loss = function(layers, EXPERTS, 2, kept)
        if loss.requires_grad:
            loss.backward()
        found.append(
            [loss.detach(), *(torch.zeros_like(each) if each.grad is None else each.grad for each in layers)]
        )
    assert (
        far(found[1], found[0]) < 1e-2
        and torch.isfinite(torch.cat([each.flatten() for each in found[1]])).all()
    )
    assert slot(None, EXPERTS, 2, None) == 0


def of_loss(function, device, dtype, **options):
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, WEIGHT[1]).to(device, dtype).requires_grad_()
    weight = torch.randn(WEIGHT).to(device, dtype).requires_grad_()
    labels = torch.randint(0, WEIGHT[0], (2, 9)).to(device)
    labels[0, 2:5] = -100
    loss, _, aux = function(labels=labels, hidden_states=hidden, weights=weight, **options)
    outputs = [loss] if aux is None else [each for each in vars(aux).values() if each is not None]
    total = sum(
        (each * torch.arange(1, each.numel() + 1, device=device).view(each.shape)).sum() for each in outputs
    )
    total.backward()
    return [*(each.detach() for each in outputs), hidden.grad, weight.grad]


SHIFTED = torch.arange(18).view(2, 9)
TEACHER = {
    "teacher_topk_ids": torch.arange(54).view(2, 9, 3) % 53,
    "teacher_topk_log_probs": -torch.ones(2, 9, 3),
}


@places
@dtypes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_items_in_batch": 7, "use_cache": False},
        {"shift_labels": SHIFTED},
        {"return_log_probs": True},
        {"return_log_probs": True, "temperature": 0.7, "chunk_size": 4},
        {"return_log_probs": True, "shift_labels": SHIFTED},
        {"return_log_probs": True, **TEACHER},
    ],
    ids=lambda options: "-".join(options) or "loss",
)
def test_the_causal_loss_and_its_statistics(name, device, dtype, options) -> None:
    slot = OpSlot("cross_entropy_loss", "causal")
    slot.bind(name)
    options = {
        key: each.to(device) if isinstance(each, torch.Tensor) else each for key, each in options.items()
    }
    found = of_loss(slot, device, dtype, vocab_size=WEIGHT[0], **options)
    expected = of_loss(ForCausalLMLoss, device, dtype, vocab_size=WEIGHT[0], **options)
    assert (
        len(found) == (5 if "teacher_topk_ids" in options else 2 if "return_log_probs" in options else 1) + 2
    )
    assert far(found, expected) < TOLERANCES[dtype] * (1 if dtype is torch.float32 else 2)


@places
def test_the_loss_of_sequences(name, device) -> None:
    slot = OpSlot("cross_entropy_loss", "seq_cls")
    slot.bind(name)
    found = of_loss(slot, device, torch.float32, num_labels=WEIGHT[0])
    assert (
        far(found, of_loss(ForSequenceClassificationLoss, device, torch.float32, num_labels=WEIGHT[0])) < 2e-5
    )


def test_a_loss_of_logits_alone_is_an_error() -> None:
    slot = OpSlot("cross_entropy_loss", "causal")
    slot.bind("veomni_hook_torch")
    labels = torch.ones(1, 4, dtype=torch.int64)
    for options in ({}, {"return_log_probs": True}):
        with pytest.raises(KernelError, match=r"no hidden_states or no weights[\s\S]*to eager"):
            slot(logits=torch.randn(1, 4, 5), labels=labels, vocab_size=5, **options)
    with pytest.raises(KernelError, match="need labels"):
        slot(hidden_states=torch.randn(1, 4, 5), weights=torch.randn(5, 5), return_log_probs=True)


@places
@pytest.mark.parametrize("limit", [None, 0.5])
def test_the_experts_behind_veomnis_pointer(name, device, limit, monkeypatch) -> None:
    monkeypatch.setattr(moe, "_fused_moe_forward", None)
    moe.apply_veomni_fused_moe_patch(name)
    assert moe._fused_moe_forward.__name__ == f"{name}_fused_moe_forward"
    home = generated("deepseek_v4" if limit else "deepseek_v3")
    from tests.integrations.veomni_cases import CONFIG, of_module, routed

    module = home.DeepseekV4Experts(CONFIG) if limit else stacked(home)
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


def stacked(home):
    from tests.integrations.veomni_cases import CONFIG

    config = copy.copy(CONFIG)
    config.num_local_experts = EXPERTS
    return home.DeepseekV3NaiveMoe(config)


def test_expert_parallelism_is_refused_when_a_slot_is_bound_and_when_it_is_called(monkeypatch) -> None:
    from veomni.distributed import parallel_state

    case = next(make for make in CASES if make.__name__ == "experts")("cpu", torch.float32)
    case.slot.bind("veomni_hook_torch")
    monkeypatch.setattr(parallel_state.ParallelState, "ep_enabled", True)
    monkeypatch.setattr(parallel_state, "_PARALLEL_STATE", parallel_state.ParallelState())
    for call in (lambda: results(case), lambda: case.slot.bind("veomni_hook_torch")):
        with pytest.raises(KernelError, match="expert parallelism is on"):
            call()
    case.slot.bind("eager")


@pytest.mark.parametrize("op", entries.LEGACY)
def test_the_older_registry_has_the_names(op) -> None:
    for backend in ("torch", "triton", "npu"):
        assert get_op(op).backends[f"veomni_hook_{backend}"].entry == entries.entry(op, backend)
    with pytest.raises(AttributeError, match="no_such"):
        _ = entries.no_such


def test_a_norms_forward_reads_either_name_of_its_epsilon() -> None:
    case = norm_case("cpu", torch.float32)
    case.slot.bind("eager")
    expected = case.module(case.inputs[0])
    assert torch.allclose(entries.rms_norm_torch(case.module, case.inputs[0]), expected)
    case.module.eps = vars(case.module).pop("variance_epsilon")
    assert torch.allclose(entries.rms_norm_torch(case.module, case.inputs[0]), expected)


FIELDS = sorted({each.field for each in register().kernels})


def test_the_configuration_takes_the_names() -> None:
    for name in ("veomni_hook_torch", "veomni_hook_triton", "veomni_hook_npu"):
        config = OpsImplementationConfig(attn_implementation="eager", **dict.fromkeys(FIELDS, name))
        assert {getattr(config, field) for field in FIELDS} == {name}


def test_on_an_npu_the_configuration_takes_those_that_run_there(monkeypatch) -> None:
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
def test_hardware_that_is_missing_is_veomnis_error() -> None:
    for name, needed in (("veomni_hook_triton", "gpu"), ("veomni_hook_npu", "npu")):
        with pytest.raises(RuntimeError, match=f"requires device_type='{needed}'"):
            OpSlot("rms_norm", "standard").bind(name)
        with pytest.raises(RuntimeError, match=f"requires device_type='{needed}'"):
            cross_entropy.install_loss_mapping(name)
        with pytest.raises(KernelError, match=r"cannot use '\w+': needs"):
            moe.apply_veomni_fused_moe_patch(name)
    with pytest.raises(KeyError, match="veomni_hook_torch"):
        OpSlot("rms_norm", "standard").bind("veomni_hook_tritno")


def test_a_second_registration_changes_nothing(registered) -> None:
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


def test_a_registration_prints_a_table(registered) -> None:
    lines = repr(registered).splitlines()
    assert lines[0] == "registered in VeOmni: veomni_hook_torch, veomni_hook_triton, veomni_hook_npu"
    assert any(
        line.split() == ["moe_implementation", "moe_experts/standard", "moe_experts/gated"] for line in lines
    )
    assert "  veomni.ops.kernels.moe.apply_veomni_fused_moe_patch" in lines


def test_other_names_are_veomnis_own() -> None:
    assert cross_entropy.install_loss_mapping("eager") == "CrossEntropy (eager)"
    with pytest.raises(ValueError, match="Unknown cross_entropy_loss_implementation: 'nothing'"):
        cross_entropy.install_loss_mapping("nothing")
    with pytest.raises(ValueError, match="Invalid fused_moe_kernel: 'nothing'"):
        moe.apply_veomni_fused_moe_patch("nothing")


def without_field(monkeypatch) -> str:
    monkeypatch.delattr(arguments_types, "_NPU_ALLOWED")
    return "has no '_NPU_ALLOWED'"


def other_signature(monkeypatch) -> str:
    monkeypatch.setattr(cross_entropy, "install_loss_mapping", lambda name: name)
    return "install_loss_mapping has no parameter 'impl'"


def no_slot(monkeypatch) -> str:
    monkeypatch.delitem(kernel_registry.KERNEL_REGISTRY._specs, ("rms_norm", "standard"))
    return "nothing for op 'rms_norm', variant 'standard'"


def other_spec(monkeypatch) -> str:
    monkeypatch.setattr(kernel_registry, "KernelSpec", int)
    return "KernelSpec has no field 'name'"


@pytest.mark.parametrize("change", [without_field, other_signature, no_slot, other_spec])
def test_another_veomni_is_an_error_and_nothing_is_registered(change, monkeypatch) -> None:
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


def test_calls_that_a_kernel_refuses_run_its_formula_with_one_warning(caplog) -> None:
    case = norm_case("cpu", torch.float64)
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


def test_an_unweighted_norm_has_no_weight() -> None:
    slot = unweighted_rms_norm("cpu", torch.float32).slot
    slot.bind("veomni_hook_torch")
    with pytest.raises(KernelError, match="called with a weight"):
        slot(torch.randn(2, 3), torch.ones(3), 1e-6)
    slot.bind("eager")


@places
def test_bound_slots_compile_into_one_graph(name, device) -> None:
    for make in CASES:
        case = make(device, torch.float32)
        case.slot.bind(name)
        torch._dynamo.reset()
        compiled = torch.compile(case.function, fullgraph=True, backend="aot_eager")
        try:
            assert far(results(case._replace(function=compiled)), results(case)) < 2e-5
        finally:
            case.slot.bind("eager")
