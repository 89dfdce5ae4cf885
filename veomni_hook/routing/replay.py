"""`replay`: let routers choose the experts that were recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from veomni_hook.errors import RoutingError
from veomni_hook.layout import counted, shortened
from veomni_hook.routing.positions import Split
from veomni_hook.routing.routes import Call, Routes
from veomni_hook.routing.session import Session, opened

__all__ = ["replay"]

_WHERE = "routing.replay"


class _Replay(Session):
    def __init__(self, model: nn.Module, routes: Routes, leave: Collection[str]) -> None:
        super().__init__(model, leave, _WHERE)
        names = set(self.routers.names.values())
        if unknown := [name for name in routes.calls if name not in names]:
            raise RoutingError(
                f"the model has no recognised router {shortened(unknown)}",
                where=_WHERE,
                fix=f"replay routes in the recorded model; its routers are {shortened(sorted(names))}",
            )
        self.routes = routes
        self.taken = dict.fromkeys(routes.calls, 0)

    def given(self, name: str, logits: torch.Tensor, split: Split | None) -> Call:
        """Return what the router chose in the recorded call with the number of this one."""
        calls = self.routes.calls.get(name, ())
        number = self.taken.get(name, 0)
        if number >= len(calls):
            raise RoutingError(
                f"{name} is called for the {number + 1}. time, but {counted(len(calls), 'call')} of it "
                f"{'was' if len(calls) == 1 else 'were'} recorded",
                where=_WHERE,
                fix="run as many forward passes as were recorded, in the same order",
            )
        self.taken[name] = number + 1
        return calls[number]

    def check(self) -> None:
        """Raise RoutingError if there are routes that no call took."""
        super().check()
        left = [name for name, calls in self.routes.calls.items() if self.taken[name] < len(calls)]
        if left:
            raise RoutingError(
                f"recorded calls of {counted(len(left), 'router')} were not replayed: {shortened(left)}",
                where=_WHERE,
                fix="run as many forward passes as were recorded, in the same order; after `generate`, "
                "Routes.as_sequences(batch) makes one call of all",
            )


@contextmanager
def replay(model: nn.Module, routes: Routes, *, leave: Collection[str] = ()) -> Iterator[None]:
    """Let the routers of ``model`` choose what ``routes`` say, in the forward passes of the block.

    Routers compute the weights of the given experts from their present logits, with their own formula, so
    gradients flow into them. With the logits of the recorded pass, weights have its bits, whichever backend
    computed them (on Ascend, the last bit may differ). The n-th call of a router gets its n-th recorded call.
    The backward pass may run
    after the block: calls that a checkpoint repeats get the routes of their forward pass.

    Args:
        model: a model, or a wrapper of one, with recognised routers.
        routes: for every router that is called; move them to the model's device first, or every layer copies
            its own. Not mutated.
        leave: patterns (as of `fnmatch`) of names of routers, or of blocks of experts, that are left to
            themselves.

    Raises:
        RoutingError: a router is not recognised; the routes are not those of this model, or of these batches
            (the names, the number of calls, of tokens, of experts or of experts a token differ).
        KernelError: the model is not patched, or a kernel of another package cannot take experts.
    """
    with opened(_Replay(model, routes, leave)):
        yield
