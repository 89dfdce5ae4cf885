"""`record`: keep the experts that routers choose."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from veomni_hook.routing.routes import Call, Routes, compact
from veomni_hook.routing.session import Routed, Session, opened

__all__ = ["record"]


class _Record(Session):
    def __init__(self, model: nn.Module, leave: Collection[str], *, weights: bool) -> None:
        super().__init__(model, leave, "routing.record")
        self.routes = Routes._of({})
        self.weights = weights

    @torch.no_grad()
    def see(self, routed: Routed) -> None:
        """Keep what the router chose."""
        experts = routed.logits.shape[-1]
        ids = compact(routed.indices.reshape(-1, routed.indices.shape[-1]), experts)
        # Upstream's code may change weights in place.
        weights = routed.weights.reshape(ids.shape).clone() if self.weights else None
        if routed.split is not None:
            ids = routed.split.whole(ids)
            weights = None if weights is None else routed.split.whole(weights)
        self.routes._add(routed.name, Call(experts, ids, weights))


@contextmanager
def record(model: nn.Module, *, weights: bool = False, leave: Collection[str] = ()) -> Iterator[Routes]:
    """Record what the routers of ``model`` choose in the forward passes of the block.

    Recording changes no bit of what the model computes, and waits for no device. Calls that a checkpoint
    repeats in a backward pass are not recorded again. Where processes share sequences, each records all
    positions.

    Args:
        model: a model, or a wrapper of one, with recognised routers.
        weights: record the weights of the experts as well, as the router's formula gives them: before
            upstream casts or scales them.
        leave: patterns (as of `fnmatch`) of names of routers, or of blocks of experts, that are left to
            themselves.

    Yields:
        What is recorded, on the device of the model; it grows with every call.

    Raises:
        RoutingError: a router is not recognised, or, at the end of the block, did not pass its calls on.
        KernelError: the model is not patched.
    """
    session = _Record(model, leave, weights=weights)
    with opened(session):
        yield session.routes
