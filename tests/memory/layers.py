"""A stack of layers with attention and a wide MLP, as upstream's are, without upstream."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS = 32, 4


class Mlp(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.down(self.dropout(functional.silu(self.up(x))))


class Layer(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm, self.qkv, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), mlp
        self.attention = functional.scaled_dot_product_attention

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.attend(*heads).transpose(1, 2).flatten(2)
        return x + self.mlp(x)

    def attend(self, query, key, value):
        return self.attention(query, key, value, is_causal=True)


class Stack(nn.Module):
    def __init__(self, number=3, dropout=0.0, mlp=Mlp):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(mlp(dropout)) for _ in range(number))

    def forward(self, x, run=lambda layer, x: layer(x)):
        for layer in self.layers:
            x = run(layer, x)
        return x.square().mean()


def inputs(rows=2, positions=24, **options):
    return torch.randn(rows, positions, WIDTH, generator=torch.Generator().manual_seed(1), **options)


def step(stack, x, run=lambda layer, x: layer(x)):
    """The loss and every gradient."""
    stack.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    loss = stack(x, run)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in stack.parameters() if p.requires_grad)]
