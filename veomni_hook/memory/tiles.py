"""Modules that work on each position by itself, run on some positions at a time.

Forward:  y[tile] = module(x[tile]) without a graph, tile by tile
Backward: for each tile, its forward once more, then dx[tile] and a share of the parameters' gradients
Shapes: x, y ``[batch, positions, width]``; a tile is some positions of all rows. Saved: x. Gradients of
parameters are summed in float32. Mutates: nothing.

A layer that is checkpointed runs the module no more often: its recomputation ends where x is saved
(`veomni_hook.kernels.shared.held`). Random numbers of a tile are the same in both of its passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import local
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import get_device_states, set_device_states

from veomni_hook.kernels.shared.autograd import is_recorded
from veomni_hook.kernels.shared.held import hold, saved_by
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.memory import parts

__all__ = ["LEAST", "by_position", "rows_of_tile"]

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]

#: The fewest rows of a tile: with fewer, products wait for the weights.
LEAST = 1024
#: From this many times the width of x on, what a module computes is worth tiles.
_WIDE = 2


class _Running(local):
    """Whether a tile runs in this thread."""

    tile: bool = False


_running = _Running()


def by_position(owner: type[nn.Module]) -> type[nn.Module]:
    """Let the forward of a class, which gets one tensor, run in tiles; returns the class.

    Mutates: ``owner``.
    """
    forward = owner.forward

    @wraps(forward)
    def tiled(module: nn.Module, *operands: Any, **named: Any) -> Any:
        (x,) = (*operands, *named.values())
        if _wanted(module, x):
            return _by_tiles(forward, module, x)
        return forward(module, x)

    owner.forward = tiled
    return owner


def _wanted(module: nn.Module, x: torch.Tensor) -> bool:
    """Return whether this call of ``module`` with ``x`` runs in tiles."""
    if not parts.in_force().tiles or _running.tile or not torch.is_grad_enabled() or is_dynamo_compiling():
        return False
    return rows_of_tile(module, x) < x.shape[0] * x.shape[1] and untraceable() is None


def rows_of_tile(module: nn.Module, x: torch.Tensor) -> int:
    """Return how many rows a tile of ``x`` has; all of them if ``module`` cannot run in tiles.

    What a tile of so many rows computes is no larger than ``x``.
    """
    rows = x.shape[0] * x.shape[1] if x.dim() == 3 else 0
    asked = parts.in_force().tile_rows
    wide = max((size for p in module.parameters() for size in p.shape[-2:]), default=0) / max(1, x.shape[-1])
    if wide < _WIDE or not rows or not_plain(x, *module.parameters()) is not None:
        return rows
    if any(_is_watched(part) for part in module.modules() if part is not module):
        return rows
    return min(rows, asked or max(LEAST, int(rows / wide)))


def _is_watched(module: nn.Module) -> bool:
    """Return whether hooks would see each tile as a call."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _by_tiles(forward: Forward, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return ``forward(module, x)``, computed tile by tile."""
    call = _Call(forward, module, -(-x.shape[0] * x.shape[1] // rows_of_tile(module, x)))
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not x.requires_grad and not parameters:
        return torch.cat([call(tile) for tile in call.cut(x)], 1)
    y: torch.Tensor = _Tiled.apply(hold(x, *parameters[:1]), call, x, *parameters)  # type: ignore[no-untyped-call]
    return y


class _Call:
    """A call of a module in tiles: what both of its passes share."""

    def __init__(self, forward: Forward, module: nn.Module, number: int) -> None:
        self.forward, self.module, self.number = forward, module, number
        self.draws = any(
            isinstance(part, nn.Dropout) and part.p and part.training for part in module.modules()
        )
        self.states: list[Any] = []

    def cut(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tiles of a tensor."""
        return x.chunk(self.number, 1)

    def __call__(self, tile: torch.Tensor) -> torch.Tensor:
        outer, _running.tile = _running.tile, True
        try:
            return self.forward(self.module, tile)
        finally:
            _running.tile = outer

    def first(self, tile: torch.Tensor) -> torch.Tensor:
        """Run a tile for the first time."""
        if self.draws:
            self.states.append((torch.get_rng_state(), *get_device_states(tile)))
        return self(tile)

    @contextmanager
    def again(self, tile: int, device: torch.device) -> Iterator[None]:
        """Return the context in which a tile runs with the random numbers that it had."""
        if not self.draws:
            yield
            return
        state, devices, states = self.states[tile]
        kind = device.type
        with torch.random.fork_rng(devices, device_type=kind if devices else "cuda"):
            torch.set_rng_state(state)
            set_device_states(devices, states, device_type=kind if devices else None)
            yield


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, handle: torch.Tensor, call: _Call, x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.node, ctx.call, ctx.parameters = handle.grad_fn, call, parameters
        kind = x.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        y: torch.Tensor | None = None
        start = 0
        for tile in call.cut(x):
            part = call.first(tile)
            y = part.new_empty((*x.shape[:2], *part.shape[2:])) if y is None else y
            y.narrow(1, start, tile.shape[1]).copy_(part)
            start += tile.shape[1]
        assert y is not None  # noqa: S101 - a tensor has one tile at least
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x = saved_by(ctx.node)[0]
        call, parameters = ctx.call, ctx.parameters
        assert x is not None  # noqa: S101 - it is held
        kind, dtype, enabled = ctx.autocast
        wanted = [*parameters] if not ctx.needs_input_grad[2] else [x, *parameters]
        with torch.autocast(kind, dtype, enabled=enabled):
            if is_recorded():
                with call.again(0, x.device):
                    slopes = torch.autograd.grad(call(x), wanted, dy, create_graph=True, allow_unused=True)
                return None, None, *([None] if wanted[0] is not x else []), *slopes
            dx = torch.empty_like(x) if ctx.needs_input_grad[2] else None
            sums: list[torch.Tensor | None] = [None] * len(parameters)
            start = 0
            for number, (tile, dtile) in enumerate(zip(call.cut(x), call.cut(dy), strict=True)):
                leaf = tile.detach().requires_grad_(dx is not None)
                with torch.enable_grad(), call.again(number, x.device):
                    y = call(leaf)
                operands = (leaf, *parameters) if dx is not None else parameters
                slopes = torch.autograd.grad(y, operands, dtile, allow_unused=True)
                if dx is not None:
                    dx.narrow(1, start, tile.shape[1]).copy_(slopes[0])
                    slopes = slopes[1:]
                sums = [_added(total, slope) for total, slope in zip(sums, slopes, strict=True)]
                start += tile.shape[1]
        slopes_of = (
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(sums, parameters, strict=True)
        )
        return None, None, dx, *slopes_of


def _added(total: torch.Tensor | None, slope: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum in float32, or in the dtype of what is added if that is wider."""
    if slope is None:
        return total
    if total is None:
        return slope.to(torch.promote_types(slope.dtype, torch.float32))
    return total.add_(slope)
