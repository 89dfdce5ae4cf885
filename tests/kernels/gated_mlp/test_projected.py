"""Projections whose width is padded: what upstream's modules compute, and whatever surrounds them."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.kernels.matching import close, results
from veomni_hook.kernels.gated_mlp import projected as module
from veomni_hook.kernels.gated_mlp import widths
from veomni_hook.kernels.gated_mlp.projected import Rows, projected

WIDTH = 10


class Mlp(nn.Module):
    """Projections around a gated product; ``together``: the way in which guards in towers call them."""

    def __init__(self, bias, *, together):
        super().__init__()
        self.gate, self.up = (nn.Linear(6, WIDTH, bias=bias) for _ in "gu")
        self.down = nn.Linear(WIDTH, 6, bias=bias)
        self.together = together

    def forward(self, x):
        gate, up = projected(self.gate, self.up, x) if self.together else (self.gate(x), self.up(x))
        return self.down(functional.silu(gate) * up)


@pytest.fixture(autouse=True)
def padding(monkeypatch):
    """Pads on this device; the columns of zeros that were added to weights."""
    added = []

    def pad(tensor, sizes):
        added.append(sizes)
        return functional.pad(tensor, sizes)

    monkeypatch.setattr(module, "missing", lambda x, width: -width % 8)
    monkeypatch.setattr(module, "functional", SimpleNamespace(linear=functional.linear, pad=pad))
    return added


def both(bias=True):
    ours, theirs = (Mlp(bias, together=together) for together in (True, False))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def same(models, x, **options):
    for got, expected in zip(*(results(model, x, **options) for model in models), strict=True):
        assert got.shape == expected.shape and type(got) is torch.Tensor
        close(got, expected, 1e-5)


@pytest.fixture
def x():
    return torch.randn(3, 5, 6)


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients(bias, x, padding):
    same(both(bias), x)
    assert padding == [(0, 0, 0, 6)] * 4  # both weights, forward and backward


@pytest.mark.parametrize("frozen", ["gate", "up", "gate up", "gate up down"])
def test_frozen_projections(frozen, x):
    models = both()
    for model in models:
        for name in frozen.split():
            getattr(model, name).requires_grad_(requires_grad=False)
    same(models, x)


def test_strided_inputs(x):
    same(both(), x.transpose(0, 1))
    same(both(), torch.randn(3, 5, 12)[..., ::2])


def test_checkpoints(x):
    same(both(), x, run=lambda mlp, x: checkpoint(mlp, x, use_reentrant=False))


def test_without_gradients(x, padding):
    ours, theirs = both()
    with torch.no_grad():
        close(ours(x), theirs(x), 1e-6)
    assert len(padding) == 2


def test_modules_are_called_with_their_hooks(x):
    ours, theirs = both()
    for model in (ours, theirs):
        model.gate.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model.up.register_forward_hook(lambda module, args, output: output + args[0].sum())
    same((ours, theirs), x)


def test_wrapped_modules(x):
    models = both()
    for model in models:
        model.gate = nn.Sequential(nn.Dropout(0.0), model.gate)
        model.up = nn.utils.parametrizations.weight_norm(model.up)
    same(models, x)


def test_a_subclass_of_tensors_handles_its_own_calls(x):
    seen = []

    class Scaled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is functional.linear:
                seen.append(type(args[0]))
            return super().__torch_function__(func, types, args, kwargs or {})

    ours, _ = both()
    ours.gate.weight = nn.Parameter(ours.gate.weight.detach().as_subclass(Scaled))
    ours(x)
    assert seen and seen[0] is torch.Tensor


def test_what_the_modules_get_is_copied_and_pickled_as_a_tensor(x):
    rows = x.as_subclass(Rows)
    assert type(pickle.loads(pickle.dumps(rows))) is torch.Tensor
    assert type(rows + 1) is torch.Tensor


@pytest.mark.parametrize("autocast", [True, False])
def test_other_dtypes_and_autocast_are_torchs(autocast, x, padding):
    ours, theirs = both()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if not autocast:
            ours, theirs = ours.bfloat16(), theirs.bfloat16()
            with pytest.raises(RuntimeError, match="dtype"):
                ours(x)
            padding.clear()
        else:
            close(ours(x).float(), theirs(x).float(), 0)
    assert not padding


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [((4096, 12), torch.bfloat16, 4), ((2, 2048, 3420), torch.float16, 4), ((4096, 16), torch.bfloat16, 0),
     ((4095, 12), torch.bfloat16, 0), ((4096, 12), torch.float32, 0)],
)  # fmt: skip
def test_only_many_rows_on_a_gpu_are_padded(shape, dtype, expected):
    product = torch.empty(shape, dtype=dtype, device="meta")
    sized = SimpleNamespace(
        element_size=product.element_size, numel=product.numel, shape=product.shape, is_cuda=True
    )
    assert widths.missing(sized, shape[-1]) == expected
    sized.is_cuda = False
    assert widths.missing(sized, shape[-1]) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype, monkeypatch, padding):
    monkeypatch.setattr(module, "missing", widths.missing)
    torch.manual_seed(0)
    x = torch.randn(2, 2048, 6, device="cuda", dtype=dtype)
    models = [model.to("cuda", dtype) for model in both()]
    for got, expected in zip(*(results(model, x) for model in models), strict=True):
        close(got.float(), expected.float(), 2e-2)
    assert len(padding) == 4
