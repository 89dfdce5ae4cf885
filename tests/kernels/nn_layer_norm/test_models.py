"""Torch's LayerNorm in a whole model: by name through the kernels, otherwise torch's operator."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Starcoder2Config
from transformers.models.starcoder2 import modeling_starcoder2 as upstream

from tests.kernels.dispatched import compiled, targets
from tests.kernels.matching import DEVICE, close
from tests.kernels.patched_qwen3 import batch, trained, twins
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.tools.report.explanation import explain

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("anywhere")

BY_NAME = "nn_layer_norm=triton,add_layer_norm=triton"
OPS = ("nn_layer_norm", "add_layer_norm")


@pytest.fixture
def patched(modules) -> ModuleType:
    return modules("starcoder2")[1]


def pair(patched: ModuleType, layers: int = 2) -> list[Any]:
    """Upstream's model and the patched one with equal weights, which are not those of a fresh norm."""
    config = Starcoder2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, residual_dropout=0.0, embedding_dropout=0.0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs, ours = twins(upstream, patched, "Starcoder2ForCausalLM", config)
    for module in theirs.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    ours.load_state_dict(theirs.state_dict())
    return [theirs.to(DEVICE), ours.to(DEVICE)]


def outcomes(model: Any) -> dict[tuple[str, str], tuple[str, str]]:
    rows = [row for row in explain(model).rows if row.op in OPS]
    return {(row.op, row.place): (row.backend, row.reason) for row in rows}


def test_a_model_trains_with_the_kernels_that_were_named(patched):
    theirs, ours = pair(patched)
    inputs = {name: each.to(DEVICE) for name, each in batch().items()}
    set_choice(BY_NAME)
    step = trained(ours, inputs)
    assert {backend for backend, _ in outcomes(ours).values()} == {"triton"}
    assert len(outcomes(ours)) == 5  # two layers with both, and the last norm
    close(step, trained(theirs, inputs), 1e-4)


def test_auto_leaves_them_to_torch_and_says_so(patched):
    theirs, ours = pair(patched)
    inputs = {name: each.to(DEVICE) for name, each in batch().items()}
    set_choice("auto")
    close(trained(ours, inputs), trained(theirs, inputs), 1e-5)
    found = outcomes(ours)
    assert len(found) == 5 and {backend for backend, _ in found.values()} == {"eager"}
    assert {reason for _, reason in found.values()} == {
        "auto uses none of its kernels; choose one by name: triton"
    }


def test_a_norm_with_a_hook_is_called(patched):
    theirs, ours = pair(patched)
    seen = []
    for model in (theirs, ours):
        model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *_: seen.append(1))
    inputs = {name: each.to(DEVICE) for name, each in batch().items()}
    set_choice(BY_NAME)
    close(trained(ours, inputs), trained(theirs, inputs), 1e-4)
    assert len(seen) == 2
    backends = {place: backend for (op, place), (backend, _) in outcomes(ours).items() if op == OPS[1]}
    assert sorted(backends.values()) == ["eager", "triton"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", [BY_NAME, "auto"])
def test_compiled_without_a_break(patched, choice):
    theirs, ours = pair(patched, layers=1)
    inputs = {name: each.to(DEVICE) for name, each in batch(1, 6).items()}
    set_choice(choice)
    run, counter = compiled(ours)
    for _ in range(2):
        step = trained(run, inputs)
    assert counter.frame_count == 1
    names = ("layer_norm", "add_layer_norm")
    found = {name for name in names if f"veomni_hook.{name}.default" in targets(counter)}
    assert found == ({"layer_norm", "add_layer_norm"} if choice == BY_NAME else set())
    close(step, trained(theirs, inputs), 1e-4)
