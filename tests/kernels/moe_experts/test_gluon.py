"""Where Gluon's kernels are chosen, and whether they compile for Hopper; test_gluon_on_gpu.py runs them."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tensors of a CPU count as a GPU's here", allow_module_level=True)

import triton

from tests.processes import outputs, started
from veomni_hook.kernels.moe_experts import (
    device,
    gluon_choice,
    gluon_products,
    triton_products,
    triton_tiles,
    weight_gradient_device,
)
from veomni_hook.kernels.moe_experts.triton_products import Expert, Low
from veomni_hook.kernels.moe_experts.triton_routing import route
from veomni_hook.kernels.moe_experts.triton_tiles import Tile

EXPERTS, TOKENS, HIDDEN, INNER = 2, 8, 64, 128
BF16 = torch.bfloat16


@pytest.fixture
def hopper(monkeypatch):
    """Tensors of the CPU count as a Hopper GPU's, and this release of Triton as known."""
    monkeypatch.setattr(gluon_choice, "_device_refuses", lambda _: None)
    monkeypatch.setattr(gluon_choice, "_release_refuses", lambda: None)


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def routing(block=128):
    return route(torch.arange(TOKENS).view(-1, 1) % EXPERTS, EXPERTS, block)


def weight_gradient_refuses(
    left=None, right=None, *, block=128, gathered=(True, False), dtype=BF16, columns=(HIDDEN, INNER)
):
    left = zeros(TOKENS, columns[0]) if left is None else left
    right = zeros(TOKENS, columns[1]) if right is None else right
    return gluon_choice.weight_gradient_refuses(left, right, routing(block), gathered, dtype)


@pytest.mark.usefixtures("hopper")
def test_weight_gradients_that_gluon_computes():
    assert weight_gradient_refuses() is None
    assert weight_gradient_refuses(gathered=(False, True)) is None
    assert weight_gradient_refuses(columns=(144, 272)) is None
    half = [zeros(TOKENS, n, dtype=torch.float16) for n in (HIDDEN, INNER)]
    assert weight_gradient_refuses(*half, dtype=torch.float16) is None
    assert weight_gradient_refuses(zeros(TOKENS, HIDDEN + 16)[:, :HIDDEN]) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("reason", "how"), [
    ("in order", {"gathered": (False, False)}),
    ("few rows", {"block": 64}),
    ("gradient is in torch.float32", {"dtype": torch.float32}),
    ("no multiple of 16", {"columns": (136, INNER)}),
    ("no multiple of 16", {"columns": (HIDDEN, 200)}),
    ("torch.float16", {"right": zeros(TOKENS, INNER, dtype=torch.float16)}),
    ("torch.float32", {"left": zeros(TOKENS, HIDDEN, dtype=torch.float32), "dtype": torch.float32}),
    ("not aligned", {"left": zeros(TOKENS, HIDDEN + 8)[:, :HIDDEN]}),
    ("not aligned", {"left": zeros(TOKENS * HIDDEN + 16)[1 : 1 + TOKENS * HIDDEN].view(TOKENS, HIDDEN)}),
    ("not aligned", {"left": zeros(HIDDEN, TOKENS * 2).T[:TOKENS]}),
])  # fmt: skip
def test_weight_gradients_that_are_left_to_triton(reason, how):
    assert reason in weight_gradient_refuses(**how)


def backward_refuses(hidden=HIDDEN, inner=INNER, *, form=0, paired=1, block=128, weight=None, dtype=BF16):
    weight = zeros(EXPERTS, hidden, inner, dtype=dtype) if weight is None else weight
    products = zeros(TOKENS, inner * (2 if paired else 1), dtype=dtype)
    return gluon_choice.gate_up_backward_refuses(
        zeros(TOKENS, hidden, dtype=dtype), weight, products, routing(block), form=form, paired=paired
    )


@pytest.mark.usefixtures("hopper")
def test_gradients_of_gate_and_up_that_gluon_computes():
    assert backward_refuses() is None
    assert backward_refuses(inner=320) is None
    assert backward_refuses(form=4, paired=0) is None
    assert backward_refuses(weight=zeros(EXPERTS, INNER, HIDDEN)) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("reason", "how"), [
    ("alternate", {"paired": 2}),
    ("alternate", {"paired": 0}),
    ("limit", {"form": 1}),
    ("limit", {"form": 3}),
    ("multiple of 64", {"hidden": 96}),
    ("multiple of 64", {"inner": 96}),
    ("multiple of 64", {"inner": 96, "form": 4, "paired": 0}),
    ("few rows", {"block": 32}),
    ("stand apart", {"weight": zeros(EXPERTS, HIDDEN + 1, INNER)[:, :HIDDEN]}),
    ("torch.float16", {"weight": zeros(EXPERTS, HIDDEN, INNER, dtype=torch.float16)}),
    ("too large", {"dtype": torch.float16}),
])  # fmt: skip
def test_gradients_of_gate_and_up_that_are_left_to_triton(reason, how):
    assert reason in backward_refuses(**how)


@pytest.mark.parametrize(("version", "known"), [
    ("3.2.0", False), ("3.5.1", False), ("3.6.0", True), ("3.6.0+git1234", True), ("3.7.1", True),
    ("3.60.0", False), ("4.6.0", False),
])  # fmt: skip
def test_releases(monkeypatch, version, known):
    monkeypatch.setattr(triton, "__version__", version)
    reason = gluon_choice._release_refuses.__wrapped__()
    assert reason is None if known else version in reason


@pytest.mark.parametrize(("capability", "shared", "reason"), [
    ((9, 0), 227 << 10, None),
    ((9, 0), 200 << 10, "204800 bytes"),
    ((8, 0), 163 << 10, "8.0"),
    ((10, 0), 227 << 10, "10.0"),
    ((12, 0), 99 << 10, "12.0"),
])  # fmt: skip
def test_gpus(monkeypatch, capability, shared, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(triton_tiles, "shared_memory", lambda _: shared)
    monkeypatch.setattr(gluon_choice, "_gpu_refuses", gluon_choice._gpu_refuses.__wrapped__)
    there = SimpleNamespace(is_cuda=True, device=SimpleNamespace(type="cuda", index=0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    found = gluon_choice._device_refuses(there)
    assert found is None if reason is None else reason in found
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert "interpreter" in gluon_choice._device_refuses(there)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA" in gluon_choice._device_refuses(there)


def test_other_devices():
    assert "cpu" in gluon_choice._device_refuses(zeros(1))


class Nothing:
    """A kernel that does nothing."""

    def __getitem__(self, _grid):
        return lambda *_, **__: None


@pytest.fixture
def launched(monkeypatch, hopper):
    """The names of what Gluon would launch; nothing is computed."""
    names = []
    monkeypatch.setattr(device, "gate_up_backward", Nothing())
    monkeypatch.setattr(weight_gradient_device, "weight_gradient", Nothing())
    for name in ("weight_gradient", "gate_up_backward"):
        monkeypatch.setattr(gluon_products, name, lambda *_, name=name, **__: names.append(name))
    return names


def test_who_computes_a_weight_gradient(launched):
    call = (zeros(TOKENS, HIDDEN), zeros(TOKENS, INNER), routing())
    out = triton_products.weight_gradient(*call, gathered=(True, False))
    assert launched == ["weight_gradient"] and out.shape == (EXPERTS, HIDDEN, INNER)
    # Adapters choose a tile. Rows in order have descriptors on both sides.
    triton_products.weight_gradient(*call, gathered=(True, False), tile=Tile(16, 16, 16, 4, 2))
    triton_products.weight_gradient(*call, gathered=(False, False))
    triton_products.weight_gradient(*call, gathered=(True, False), dtype=torch.float32)
    assert launched == ["weight_gradient"]


def test_who_computes_gradients_of_gate_and_up(launched):
    given = routing()
    call = (zeros(TOKENS, HIDDEN), zeros(EXPERTS, HIDDEN, INNER), zeros(TOKENS, 2 * INNER), given)
    call += (zeros(TOKENS, 1), Expert(0, 0))
    for spend in (False, True):
        gradients, h, partial = triton_products.gate_up_backward(*call, spend=spend)
        assert (gradients is call[2]) is spend
        assert h.shape == (TOKENS, INNER) and partial.shape == (1, TOKENS)
    assert launched == ["gate_up_backward"] * 2
    low = Low(zeros(TOKENS, 16), zeros(EXPERTS, 16, INNER), turned=True)
    tile = Tile(128, 64, 64, 4, 2)
    for how in ({"low": low}, {"ordered": True}, {"tile": tile}):
        triton_products.gate_up_backward(*call, spend=False, **how)
    limited = (*call[:-1], Expert(1, 0, 0.4))
    triton_products.gate_up_backward(*limited, spend=False)
    assert launched == ["gate_up_backward"] * 2


@pytest.mark.slow
def test_gluon_is_not_imported_before_it_is_used():
    code = "import sys, veomni_hook.kernels.moe_experts.triton; assert 'triton.experimental.gluon' not in sys.modules"
    outputs(started("-c", code))


@pytest.mark.slow
@pytest.mark.skipif(gluon_choice._release_refuses() is not None, reason="another Gluon")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_compile_and_fit(which):
    printed, _ = outputs(started("-m", "tests.kernels.moe_experts.gluon_compiled", which))
    kernels = [json.loads(line) for line in printed.splitlines()]
    assert {each["name"] for each in kernels} == {"weight_gradient", "gate_up_backward"}
    assert max(each["shared"] for each in kernels) <= gluon_choice.SHARED_MEMORY
    assert all(each["wgmma"] for each in kernels)
    assert all(each["spilled"] < 8 for each in kernels)
