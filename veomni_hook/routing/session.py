"""What happens around the calls of routers while a block of `record`, `replay` or `monitor` is open.

The kernels' seam calls `_around` for every call of every recognised router. Forward passes go through the
open sessions of the router's model; in a backward pass, a call gets what it got in the forward pass that it
repeats, and no session sees it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from veomni_hook.errors import RoutingError
from veomni_hook.kernels.moe_router import reference
from veomni_hook.kernels.moe_router.seam import at_given, install
from veomni_hook.kernels.shared.history import History, in_backward
from veomni_hook.kernels.slot import Slot
from veomni_hook.kernels.slot.arguments import operand_names
from veomni_hook.layout import counted, shortened
from veomni_hook.routing.positions import Split, split_of
from veomni_hook.routing.routers import routers_of
from veomni_hook.routing.routes import Call

__all__ = ["Given", "Routed", "Session", "opened"]

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Routed(NamedTuple):
    """One call of a router in a forward pass.

    Attributes:
        name: of the router in its model.
        variant: of its formula.
        operands: of the formula, the logits ``[tokens, experts]`` first.
        weights: ``[tokens, top_k]``.
        indices: ``[tokens, top_k]``, int64.
        split: how the batch is split over processes; the tensors are of this process.
    """

    name: str
    variant: str
    operands: tuple[Any, ...]
    weights: torch.Tensor
    indices: torch.Tensor
    split: Split | None

    @property
    def logits(self) -> torch.Tensor:
        """The logits, without a gradient."""
        return self.operands[0].detach()  # type: ignore[no-any-return]

    def operand(self, name: str) -> Any:
        """Return an operand of the formula by its name."""
        return self.operands[_places(self.variant)[name]]


class Given(NamedTuple):
    """The experts that a router is given in a call."""

    call: Call
    split: Split | None

    def indices(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the experts of the tokens of ``logits``, as a kernel takes them."""
        ids = self.call.ids.to(logits.device, non_blocking=True)
        if self.split is not None:
            ids = self.split.own(ids)
        return ids.long().view(*logits.shape[:-1], -1)


class Session:
    """Something that sees every call of a model's routers in forward passes, and may decide about it.

    Args:
        model: its routers are those that the session sees.
        leave: patterns of names of routers, or of blocks of experts, that are left to themselves.
        where: the function that opens the session, for messages.

    Raises:
        RoutingError, KernelError: see `veomni_hook.routing.routers.routers_of`.
    """

    def __init__(self, model: nn.Module, leave: Collection[str], where: str) -> None:
        self.where = where
        self.routers = routers_of(model, leave, where)
        self.called: set[str] = set()

    def given(self, name: str, logits: torch.Tensor, split: Split | None) -> Call | None:
        """Return what the router has to choose for its next call; None: it chooses itself."""
        return None

    def see(self, routed: Routed) -> None:
        """Take note of a call."""

    def check(self) -> None:
        """Raise RoutingError if a router ran past its slot; called at the end of a block without an error."""
        missed = self.routers.uncalled(self.called)
        if missed:
            raise RoutingError(
                f"{counted(len(missed), 'router')} did not ask: {shortened(missed)}",
                where=self.where,
                fix="run a forward pass of the model in the block. If it did run, something replaced these "
                "modules' code (`veomni_hook.explain(model)` shows it), or a graph was captured before; "
                "leave=(...) with patterns of these names leaves routers to themselves",
            )


def _gone(name: str) -> RoutingError:
    return RoutingError(
        f"a checkpoint computes a call of {name} again whose routes are no longer held",
        where="routing.replay, in a backward pass",
        fix="run the backward pass of a replayed forward pass before the next ones, or use checkpoints with "
        "use_reentrant=False",
    )


_open: list[Session] = []
_history = History(_gone)
_lock = threading.Lock()


@contextmanager
def opened(session: Session) -> Iterator[None]:
    """Let ``session`` see the calls of its model's routers in a block, then `Session.check` it."""
    with _lock:
        _open.append(session)
        install(_around)
    try:
        yield
    finally:
        with _lock:
            _open.remove(session)
            _settle()
    session.check()


def _settle() -> None:
    """Leave the routers alone when nobody needs their calls any more."""
    if not _open and not _history:
        install(None)


def _around(slot: Slot, router: nn.Module, run: Kernel | None, operands: tuple[object, ...]) -> Kernel | None:
    if in_backward():
        recalled = _history.recall(router)
        if recalled is None:
            return run
        kernel = at_given(slot.variant, run)
        return lambda *operands: kernel(*operands, indices=recalled.indices(operands[0]))
    sessions = [session for session in _open if router in session.routers.names]
    if not sessions:
        _history.passed(router)
        _settle()
        return run
    changed = None if run is not None else slot.replaced(router, operands)
    if changed is not None:
        raise RoutingError(
            f"it is unknown how {sessions[0].routers.names[router]} routes: {changed}",
            where=sessions[0].where,
            fix="undo the replacement, or use leave=(...) with the router's name",
        )
    return partial(_routed, sessions, slot.variant, router, run)


def _routed(
    sessions: list[Session], variant: str, router: nn.Module, run: Kernel | None, *operands: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = operands[0]
    split = split_of(router, logits.shape[:-1].numel())
    for session in reversed(sessions):
        name = session.routers.names[router]
        call = session.given(name, logits, split)
        if call is not None:
            _check_fits(session.where, name, call, logits, operands[_places(variant)["top_k"]], split)
            recorded = Given(call, split)
            weights, indices = at_given(variant, run)(*operands, indices=recorded.indices(logits))
            _history.note(router, recorded, weights)
            break
    else:
        weights, indices = (run or reference.of(variant))(*operands)
        _history.passed(router)
    for observer in sessions:
        name = observer.routers.names[router]
        observer.called.add(name)
        observer.see(Routed(name, variant, operands, weights.detach(), indices, split))
    return weights, indices


def _check_fits(
    where: str, name: str, call: Call, logits: torch.Tensor, top_k: int, split: Split | None
) -> None:
    """Raise if the call's tokens are not those of ``logits``, of this process."""
    own = logits.shape[:-1].numel()
    whole = own if split is None else split.tokens
    if (call.experts, *call.ids.shape) != (logits.shape[-1], whole, top_k):
        raise RoutingError(
            f"the routes of {name} are {call.ids.shape[1]} of {call.experts} experts for {call.ids.shape[0]} "
            f"tokens, but the router chooses {top_k} of {logits.shape[-1]} for {whole}",
            where=where,
            fix="replay routes with the batch, and the model, that they were recorded with. Routes of "
            "`generate` are one call for each token: Routes.as_sequences(batch) makes one call of all, for "
            "every token of the result but the last. Routes.rows and Routes.joined cut and join by tokens",
        )


@cache
def _places(variant: str) -> dict[str, int]:
    return {name: place for place, name in enumerate(operand_names("moe_router", variant))}
