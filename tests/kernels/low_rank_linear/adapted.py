"""PEFT's layers in the form that idioms route, beside the installed ones, and layers of both kinds."""

import copy
import inspect

import torch
from peft import LoraConfig
from torch import nn

from tests.kernels.matching import grads_of


def layer_of(home, base, dtype=None, *, names=("default",), rank=4, **options):
    """Return an adapted layer of PEFT's module ``home``; its factors are random, of ``dtype`` or the base's."""
    made = None
    for name in names:
        config = LoraConfig(r=rank, **{"lora_alpha": 2 * rank + 1, **options})
        given = _given(home, config)
        if made is None:
            made = home.Linear(base, name, r=rank, **given)
        else:
            made.update_layer(name, rank, **given)
    made.set_adapter([*names])
    generator = torch.Generator().manual_seed(3)
    for name, each in made.named_parameters():
        if "lora_" in name:
            width = max(each.shape)
            each.data = torch.randn(each.shape, generator=generator).div_(width**0.5)
            each.data = each.data.to(dtype or base.weight.dtype)
    for each in base.parameters():
        each.requires_grad_(False)
    return made


#: What PEFT's layers take instead of a config, before 0.19.
_OF_CONFIG = ("lora_dropout", "init_lora_weights", "use_rslora", "use_dora", "lora_bias")


def _given(home, config):
    """Return the arguments of PEFT's layers that a config has, as the installed release takes them."""
    found = {"lora_alpha": config.lora_alpha}
    if "config" in inspect.signature(home.Linear.update_layer).parameters:
        return found | {"config": config}
    return found | {name: getattr(config, name) for name in _OF_CONFIG}


def pair(patched, base, dtype=None, **options):
    """Return upstream's layer and the patched one, with equal weights."""
    import peft.tuners.lora.layer as upstream

    return tuple(layer_of(home, copy.deepcopy(base), dtype, **options) for home in (upstream, patched))


def base_of(inner=24, outer=40, dtype=torch.float32, *, bias=True):
    """Return a linear layer with the same weights at every call."""
    torch.manual_seed(0)
    return nn.Linear(inner, outer, bias=bias).to(dtype)


def results(layer, x, run=None, *, to_x=True):
    """Return the output and every gradient, by name."""
    layer.zero_grad()
    x = x.detach().requires_grad_(to_x)
    torch.manual_seed(1)
    y = (layer if run is None else run)(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).bfloat16().to(y)
    y.backward(dy)
    return {"y": y.detach(), **({"x": x.grad} if to_x else {}), **grads_of(layer)}
