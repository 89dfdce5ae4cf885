"""Modules that work on each position by itself, run on some positions at a time.

Forward:  y[tile] = module(x[tile]), each tile in a checkpoint of its own, whose graph is kept
Backward: for each tile, its forward once more, then dx[tile] and a share of the parameters' gradients
Shapes: x ``[batch, positions, width]``, y ``[batch, positions, any]``; a tile is ``[1, rows, width]``, some
of all ``batch * positions`` rows. In towers and shared experts x is ``[rows, width]``, and so are tiles.
Saved: x. Gradients of parameters are summed in float32. Mutates: nothing.

The graph of a tile has ends of its own (`_Enter`, `_Leave`): it holds no tensor, and neither x nor y. A layer
that is checkpointed runs the module no more often: its recomputation ends where x is saved
(`veomni_hook.kernels.shared.held`), and that of a tile before its last product. Random numbers of a tile are
the same in both of its passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from threading import local
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from veomni_hook.kernels.shared.autograd import is_recorded
from veomni_hook.kernels.shared.changed import changed
from veomni_hook.kernels.shared.held import hold, saved_by
from veomni_hook.kernels.shared.operand_checks import not_plain, untraceable
from veomni_hook.memory import parts

__all__ = ["LEAST", "MULTIPLE", "by_position"]

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]

#: The fewest rows of a tile: with fewer, the device waits for the host; and what they are a multiple of.
LEAST, MULTIPLE = 8192, 256
#: The most rows of a tile: more are no faster, and its backward keeps several results of this size.
MOST = 16_384
#: What a module computes is worth tiles where it is more than so many times as large as x; a tile is not.
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
        call = _call(forward, module, x)
        return forward(module, x) if call is None else call.run(x)

    owner.forward = tiled
    return owner


def _call(forward: Forward, module: nn.Module, x: torch.Tensor) -> _Call | None:
    """Return the call of ``module`` with ``x`` in tiles, or None if it runs on all positions at once."""
    if not parts.in_force().tiles or _running.tile or not torch.is_grad_enabled() or is_dynamo_compiling():
        return None
    if x.dim() not in (2, 3) or not_plain(x) is not None or untraceable() is not None:
        return None
    call = _Call(forward, module)
    # Hooks of its parts would see each tile as a call.
    watched = any(part._forward_hooks or part._forward_pre_hooks for part in call.modules[1:])
    if watched or not_plain(*call.parameters) is not None:
        return None
    call.rows = _rows(x, call.parameters)
    return call if 0 < call.rows < math.prod(x.shape[:-1]) else None


def _rows(x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> int:
    """Return the rows of a tile, whose results are no more than `_WIDE` times as large as ``x``; 0: all."""
    rows, width = math.prod(x.shape[:-1]), max(1, x.shape[-1])
    wide = max((size for p in parameters for size in p.shape[-2:]), default=0) / width
    if wide <= _WIDE:
        return 0
    if asked := parts.in_force().tile_rows:
        return asked
    number = max(min(math.ceil(wide / _WIDE), max(1, rows // LEAST)), math.ceil(rows / MOST))
    return math.ceil(rows / number / MULTIPLE) * MULTIPLE


class _Call:
    """A call of a module in tiles of ``rows``: what both of its passes share.

    Attributes:
        x, dx, dy: the tiles of these, while a pass runs; dx is None where nobody wants it.
    """

    def __init__(self, forward: Forward, module: nn.Module) -> None:
        self.forward, self.module, self.rows = forward, module, 0
        self.modules = [*module.modules()]
        named = {id(p): p for part in self.modules for p in part._parameters.values() if p is not None}
        self.parameters = [*named.values()]
        self.x: tuple[torch.Tensor, ...] = ()
        self.dx: tuple[torch.Tensor, ...] | None = None
        self.dy: tuple[torch.Tensor, ...] = ()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's result, computed tile by tile."""
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        if not x.requires_grad and not trained:
            return torch.cat([self(tile) for tile in self.cut(x)], -2).view(*x.shape[:-1], -1)
        y: torch.Tensor = _Tiled.apply(hold(x, *trained[:1]), self, x, *trained)  # type: ignore[no-untyped-call]
        return y

    def cut(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tiles of a tensor, with as many axes."""
        return torch.split(x.reshape(1, -1, x.shape[-1]) if x.dim() == 3 else x, self.rows, -2)

    def __call__(self, tile: torch.Tensor) -> torch.Tensor:
        with changed(vars(_running), {"tile": True}):
            return self.forward(self.module, tile)

    def recorded(self, leaf: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a tile of `x` from ``leaf``; return the end of its graph, and its result without one."""
        y = self(_Enter.apply(leaf, self, number))  # type: ignore[no-untyped-call]
        return _Leave.apply(y, self, number), y.detach()  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """The beginning of a tile's graph: a tile of x, whose gradient goes to dx."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, call: _Call, number: int) -> torch.Tensor:
        ctx.call, ctx.number = call, number
        return call.x[number].detach()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[None, ...]:
        ctx.call.dx[ctx.number].copy_(dx)
        return None, None, None


class _Leave(torch.autograd.Function):
    """The end of a tile's graph: no element of y, whose gradient comes from dy."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, call: _Call, number: int) -> torch.Tensor:
        ctx.call, ctx.number = call, number
        return y.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.call.dy[ctx.number], None, None


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, handle: torch.Tensor, call: _Call, x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.node, ctx.call, ctx.parameters, ctx.ends = handle.grad_fn, call, parameters, []
        kind = x.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.states = torch.get_rng_state(), *get_device_states(x)
        ctx.leaf = x.new_empty(0, requires_grad=ctx.needs_input_grad[2])
        call.x = call.cut(x)
        y: torch.Tensor | None = None
        # The checkpoint of a layer would expect its recomputation to save what is saved here.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            for number in range(len(call.x)):
                end, part = checkpoint(call.recorded, ctx.leaf, number, use_reentrant=False)
                ctx.ends.append(end)
                if y is None:
                    y = part.new_empty((*x.shape[:-1], part.shape[-1]))
                    into = call.cut(y)
                into[number].copy_(part)
        call.x = ()
        assert y is not None  # noqa: S101 - a tile is smaller than x
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x = saved_by(ctx.node)[0]
        call, parameters, needs_dx = ctx.call, ctx.parameters, ctx.needs_input_grad[2]
        assert x is not None  # noqa: S101 - it is held
        if is_recorded():
            kind, dtype, enabled = ctx.autocast
            state, devices, states = ctx.states
            forked = torch.random.fork_rng(devices, device_type=(of := kind if devices else "cuda"))
            with torch.autocast(kind, dtype, enabled=enabled), forked:
                torch.set_rng_state(state)
                set_device_states(devices, states, device_type=of)
                y = torch.cat([call(tile) for tile in call.cut(x)], -2).view(dy.shape)
            wanted = [x, *parameters] if needs_dx else [*parameters]
            slopes = torch.autograd.grad(y, wanted, dy, create_graph=True, allow_unused=True)
            return None, None, *([] if needs_dx else [None]), *slopes
        dx = x.new_empty(x.shape) if needs_dx else None
        call.x, call.dy, call.dx = call.cut(x), call.cut(dy), None if dx is None else call.cut(dx)
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        operands = [ctx.leaf, *parameters] if needs_dx else [*parameters]
        for end in ctx.ends:
            slopes = torch.autograd.grad(end, operands, end.detach(), retain_graph=True, allow_unused=True)
            sums = [_added(total, slope) for total, slope in zip(sums, slopes[needs_dx:], strict=True)]
            del slopes  # before the next tile's
        call.x, call.dy, call.dx = (), (), None
        slopes_of = (
            None if (total := sums.pop(0)) is None else total.to(parameter.dtype) for parameter in parameters
        )
        return None, None, dx, *slopes_of


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _added(total: torch.Tensor | None, slope: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum in float32, or in the dtype of what is added if that is wider."""
    if slope is None:
        return total
    if total is None:
        return slope.to(torch.promote_types(slope.dtype, torch.float32))
    return total.add_(slope)
