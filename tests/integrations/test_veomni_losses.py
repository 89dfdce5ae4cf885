"""The losses that VeOmni's slots and its mapping of losses get, against VeOmni's eager code."""

import pytest
import torch

pytest.importorskip("veomni")

from veomni.ops.dispatch import OpSlot
from veomni.ops.kernels import cross_entropy
from veomni.ops.kernels.cross_entropy import ForCausalLMLoss, ForSequenceClassificationLoss
from veomni.ops.kernels.load_balancing_loss.eager import load_balancing_loss_pytorch

from tests.integrations.veomni_cases import EXPERTS, TOLERANCES, dtypes, far, places
from veomni_hook.errors import KernelError
from veomni_hook.integrations.veomni import register

register()

WEIGHT = (53, 32)


@places
@pytest.mark.parametrize("mask", ["none", "some", "nothing"])
def test_the_load_balancing_loss(name, device, mask):
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
    labels[0, 2:5] = options.get("ignore_index", -100)
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
        {"ignore_index": 3},
        {"shift_labels": SHIFTED},
        {"return_log_probs": True},
        {"return_log_probs": True, "temperature": 0.7, "chunk_size": 4},
        {"return_log_probs": True, "ignore_index": 3},
        {"return_log_probs": True, "shift_labels": SHIFTED},
        {"return_log_probs": True, **TEACHER},
    ],
    ids=lambda options: "-".join(options) or "loss",
)
def test_the_causal_loss_and_its_statistics(name, device, dtype, options):
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
def test_the_loss_of_sequences(name, device):
    slot = OpSlot("cross_entropy_loss", "seq_cls")
    slot.bind(name)
    found = of_loss(slot, device, torch.float32, num_labels=WEIGHT[0])
    assert (
        far(found, of_loss(ForSequenceClassificationLoss, device, torch.float32, num_labels=WEIGHT[0]))
        < TOLERANCES[torch.float32]
    )


@places
def test_the_loss_of_models_without_a_slot_is_installed(name, device, monkeypatch):
    from transformers.loss.loss_utils import LOSS_MAPPING

    for key in ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification"):
        monkeypatch.setitem(LOSS_MAPPING, key, LOSS_MAPPING[key])
    assert cross_entropy.install_loss_mapping(name) == f"CrossEntropy ({name})"
    for key, eager, size in (
        ("ForCausalLM", ForCausalLMLoss, "vocab_size"),
        ("ForConditionalGeneration", ForCausalLMLoss, "vocab_size"),
        ("ForSequenceClassification", ForSequenceClassificationLoss, "num_labels"),
    ):
        found, expected = (
            of_loss(each, device, torch.float32, **{size: WEIGHT[0]}) for each in (LOSS_MAPPING[key], eager)
        )
        assert far(found, expected) < TOLERANCES[torch.float32]
        with pytest.raises(KernelError, match="no hidden_states"):
            LOSS_MAPPING[key](logits=torch.ones(1, 2, 3), labels=torch.ones(1, 2).long(), **{size: 3})


def test_a_loss_of_logits_alone_is_an_error():
    slot = OpSlot("cross_entropy_loss", "causal")
    slot.bind("veomni_hook_torch")
    labels = torch.ones(1, 4, dtype=torch.int64)
    for options in ({}, {"return_log_probs": True}):
        with pytest.raises(KernelError, match=r"no hidden_states or no weights[\s\S]*to eager"):
            slot(logits=torch.randn(1, 4, 5), labels=labels, vocab_size=5, **options)
    with pytest.raises(KernelError, match="need labels"):
        slot(hidden_states=torch.randn(1, 4, 5), weights=torch.randn(5, 5), return_log_probs=True)


@places
def test_under_sequence_parallelism_labels_are_shifted_already(name, device, monkeypatch):
    from veomni.distributed import parallel_state

    slot = OpSlot("cross_entropy_loss", "causal")
    slot.bind(name)
    shifted = of_loss(slot, device, torch.float32, return_log_probs=True)
    monkeypatch.setattr(parallel_state, "_PARALLEL_STATE", parallel_state.ParallelState())
    monkeypatch.setattr(parallel_state.ParallelState, "sp_enabled", True)
    found, expected = (
        of_loss(each, device, torch.float32, return_log_probs=True) for each in (slot, ForCausalLMLoss)
    )
    assert far(found, expected) < TOLERANCES[torch.float32] < far(found, shifted)
