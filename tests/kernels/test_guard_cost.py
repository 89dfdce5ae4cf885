"""What a guard with its launch costs the host: Python calls and memory, without the device.

The limits are exact for what runs today. A change that needs more must say why; one that needs less lowers them.
Two calls of C functions are the questions which code asks, and whether a mode intercepts functions.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from transformers import Qwen3Config

pytest.importorskip("triton")

from tests.kernels.fake_launches import faked
from tests.kernels.patched_qwen3 import load
from veomni_hook.kernels.shared import launch
from veomni_hook.kernels.slot import Slot


class Cost(NamedTuple):
    """Calls of Python functions, calls of C functions, and bytes that Python holds at most during a call."""

    python: int
    c: int
    memory: int


#: Without gradients, and of a forward with gradients, where one more C call asks for a checkpoint (0.1 us).
LIMITS = {
    "rms_norm": (Cost(18, 15, 1456), Cost(22, 20, 1939)),
    "add_rms_norm": (Cost(29, 21, 1840), Cost(34, 26, 2331)),
    "qk_norm_rotary": (Cost(29, 24, 2680), Cost(34, 28, 3539)),
    "nn_layer_norm": (Cost(26, 20, 1512), Cost(30, 25, 1987)),
    "add_layer_norm": (Cost(34, 28, 2016), Cost(39, 33, 2499)),
    "gated_mlp": (Cost(32, 24, 1416), Cost(41, 31, 2051)),
}
#: Of the memory, which depends on the Python version; measured with 3.11.
MARGIN = 1.2


def cost_of(call: Callable[[], Any]) -> Cost:
    """Return what one call costs, once everything is known that is looked up once."""
    for _ in range(5):
        call()
    count = {"call": -1, "c_call": -1}  # `call` itself, and `sys.setprofile`

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event in count:
            count[event] += 1

    gc.collect()
    gc.disable()
    try:
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            call()
            memory = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
    finally:
        gc.enable()
    return Cost(count["call"], count["c_call"], memory)


@pytest.fixture(scope="module")
def guards(tmp_path_factory) -> Iterator[dict[str, Callable[..., Any]]]:
    module = load(tmp_path_factory.mktemp("patched"))
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    slots = {
        name.removeprefix("veomni_"): each for name, each in vars(module).items() if isinstance(each, Slot)
    }

    def slot(op: str) -> Any:
        return next(each for each in slots.values() if each.op == op)

    layer = module.Qwen3DecoderLayer(config, 0)
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    kind, turn, activation = module.Qwen3RMSNorm, module.apply_rotary_pos_emb, mlp.act_fn
    x = torch.randn(1, 1, 64, requires_grad=True)
    q = torch.randn(1, 1, 4, 16, requires_grad=True).transpose(1, 2)
    k = torch.randn(1, 1, 2, 16, requires_grad=True).transpose(1, 2)
    gate, up = (torch.randn(1, 1, 64, requires_grad=True) for _ in range(2))
    tables = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    weight, eps = norm.weight, norm.variance_epsilon
    heads = (attention.q_norm.weight, attention.k_norm.weight, eps, eps)
    rms, add, qk, gated = map(slot, ("rms_norm", "add_rms_norm", "qk_norm_rotary", "gated_mlp"))
    called, summed = (Slot(op, "rounded_once", "some.module") for op in ("nn_layer_norm", "add_layer_norm"))
    torchs = torch.nn.LayerNorm(64)
    asked = (attention.q_norm, attention.k_norm, kind, turn, tables)
    calls = {
        "rms_norm": lambda: rms.kernel(norm, x, weight, eps)(x, weight, eps),
        "add_rms_norm": lambda: add.kernel(layer, x, x, norm, kind)(x, x, weight, eps),
        "nn_layer_norm": lambda: called.call(layer, torchs, x),
        "add_layer_norm": lambda: summed.kernel(layer, x, x, torchs)(x, x, torchs),
        "qk_norm_rotary": lambda: qk.kernel(attention, x, *asked)(q, k, *heads, *tables),
        "gated_mlp": lambda: gated.kernel(mlp, x, activation)(gate, up, activation),
    }
    for asking, name in (
        (rms, "rms_norm"),
        (add, "add_rms_norm"),
        (qk, "qk_norm_rotary"),
        (gated, "gated_mlp"),
    ):
        asking._asker, asking._scope = calls[name].__code__, globals()  # as if the patched text asked
    summed._asker, summed._scope = calls["add_layer_norm"].__code__, globals()
    yield {**calls, "train": lambda mode: (layer.train(mode), torchs.train(mode))}


@pytest.fixture(autouse=True)
def _without_device() -> Iterator[None]:
    with faked():
        yield


@pytest.mark.sample(2)
@pytest.mark.parametrize("op", LIMITS)
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_a_guard_costs_no_more_than_today(guards, op, gradients):
    guards["train"](gradients)
    with torch.set_grad_enabled(gradients):
        cost, limit = cost_of(guards[op]), LIMITS[op][gradients]
    assert cost.python <= limit.python, f"{cost.python} Python calls instead of {limit.python}"
    assert cost.c <= limit.c, f"{cost.c} calls of C functions instead of {limit.c}"
    assert cost.memory <= limit.memory * MARGIN, f"{cost.memory} bytes instead of {limit.memory}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("op", LIMITS)
def test_a_guard_keeps_nothing(guards, op):
    call = guards[op]
    with torch.no_grad():
        for _ in range(10):
            call()
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(100):
            call()
        gc.collect()
        assert sys.getallocatedblocks() - before < 50


@pytest.mark.parametrize("op", LIMITS)
def test_what_is_faked_is_the_launch_alone(guards, op, monkeypatch):
    launched = []
    call = launch.Launch.__call__
    monkeypatch.setattr(
        launch.Launch, "__call__", lambda self, *them: [launched.append(self), call(self, *them)][1]
    )
    for _ in range(2):
        guards[op]()
    (first, second) = launched
    assert first is second and first._raw is not None
