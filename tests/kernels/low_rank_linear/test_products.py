"""Adapters behind a gated product that is not kept: through the interpreter on a CPU, compiled on a GPU."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")
pytest.importorskip("peft")

from tests.kernels.low_rank_linear.adapted import layer_of
from tests.kernels.matching import DEVICE, close, grads_of
from veomni_hook.kernels.gated_mlp import reference, triton
from veomni_hook.kernels.gated_mlp.recomputed import Product

TOKENS, HIDDEN, WIDTH = 6, 8, 20


class Mlp(nn.Module):
    def __init__(self, home, gated, dtype, factors, **options):
        super().__init__()
        torch.manual_seed(0)
        bases = [nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)]
        layers = [layer_of(home, each.to(dtype), factors, **options) for each in bases]
        self.gate, self.up, self.down = layers
        self.gated = gated

    def forward(self, x):
        return self.down(self.gated(self.gate(x), self.up(x), functional.silu))


def results(mlp, x):
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = mlp(x)
    y.float().square().sum().backward()
    return {"y": y.detach(), "x": x.grad, **grads_of(mlp)}


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.3}, {"names": ("one", "two")}])
@pytest.mark.parametrize(
    ("dtype", "factors"), [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("trained", [False, True])
def test_gradients_reach_gate_and_up(patched, dtype, factors, options, trained):
    import peft.tuners.lora.layer as upstream

    theirs = Mlp(upstream, reference.product, dtype, factors, **options).to(DEVICE)
    ours = Mlp(patched, triton.product, dtype, factors, **options).to(DEVICE)
    for each in [*theirs.parameters(), *ours.parameters()] if trained else []:
        each.requires_grad_(True)
    x = torch.randn(2, TOKENS, HIDDEN, device=DEVICE).to(dtype)
    expected, found = results(theirs, x), results(ours, x)
    close(found, expected, 1e-5 if dtype is torch.float32 else 4e-2)


def test_the_product_is_not_saved(patched):
    mlp = Mlp(patched, triton.product, torch.float32, torch.float32).to(DEVICE)
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE, requires_grad=True)
    products, saved = [], []
    mlp.down.register_forward_pre_hook(lambda module, args: products.append(args[0]))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        mlp(x)
    assert type(products[0]) is Product
    assert products[0].data_ptr() not in {each.data_ptr() for each in saved}


def test_a_checkpoint_keeps_no_result_of_its_layers(patched):
    mlp = Mlp(patched, triton.product, torch.float32, torch.float32).to(DEVICE)
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE, requires_grad=True)
    results = []
    for layer in (mlp.gate, mlp.up):
        layer.register_forward_hook(lambda *call: results.append(weakref.ref(call[-1].untyped_storage())))
    y = checkpoint(mlp, x, use_reentrant=False)
    gc.collect()
    assert len(results) == 2
    assert [result() for result in results] == [None, None]
    y.sum().backward()


def test_a_product_that_was_written_into_is_taken_as_it_is(patched):
    import peft.tuners.lora.layer as upstream

    def doubled(gated):
        return lambda *operands: gated(*operands).mul_(2)

    theirs = Mlp(upstream, doubled(reference.product), torch.float32, torch.float32).to(DEVICE)
    ours = Mlp(patched, doubled(triton.product), torch.float32, torch.float32).to(DEVICE)
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE)
    expected, found = results(theirs, x), results(ours, x)
    close(found, expected, 1e-5)
