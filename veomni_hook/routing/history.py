"""Which routes a router was given in earlier calls, for a backward pass that computes one of them again.

A checkpoint runs a part of a forward pass again while autograd runs a node of the graph: a node that was made
after the router's call, or, with a reentrant checkpoint, right before it. Autograd numbers nodes in the order
in which they are made. So the call that is repeated is the last one whose number is not above the node's, in
whichever order the forward and backward passes of several batches follow each other, and also after the block
of a replay has ended. (Checkpoints inside of checkpoints are made again themselves: only those of the last
forward pass are found.)

What a call was given is held as long as its graph; where the graph cannot hold it (a reentrant checkpoint has
none yet, and a frozen router may have none), until it was used and the router is called again.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from veomni_hook.errors import RoutingError

__all__ = ["History", "in_backward"]

_KEY = "veomni_hook.routing"
#: Calls without a graph that are held: no more micro-batches are between a forward and its backward.
MOST_HELD = 64


class _Token:
    """Lives as long as the graph whose node holds it."""


@dataclass
class _Past:
    """A call of a router.

    Attributes:
        number: of the first node that autograd can have made for what follows; one less without gradients.
        given: what it was given; None: it chose by itself.
        alive: refers to the token in its graph, if that can hold one.
        used: whether a backward pass has computed it again.
        gone: whether what it was given is no longer held, although its graph may be.
    """

    number: int
    given: Any = None
    alive: ref[_Token] | None = None
    used: bool = False
    gone: bool = False

    @property
    def holds(self) -> bool:
        return self.given is not None and (self.alive is None or self.alive() is not None)


class History:
    """The calls of routers, as far as a backward pass may repeat them."""

    def __init__(self) -> None:
        self._calls: WeakKeyDictionary[nn.Module, list[_Past]] = WeakKeyDictionary()

    def __bool__(self) -> bool:
        return any(past.holds for calls in self._calls.values() for past in calls)

    def note(self, router: nn.Module, given: Any, weights: torch.Tensor) -> None:
        """Note that ``router`` was given ``given`` in this forward pass, and made ``weights`` of it."""
        past = _Past(_number(), given)
        if weights.grad_fn is not None:
            token = _Token()
            metadata: Any = weights.grad_fn.metadata
            metadata[_KEY] = token
            past.alive = ref(token)
        elif not torch.is_grad_enabled() and not router.training:
            past.given = None  # evaluation: nothing is computed again
        calls = self._calls.setdefault(router, [])
        self._settle(calls)
        calls.append(past)

    def passed(self, router: nn.Module) -> None:
        """Note that ``router`` chose by itself in this forward pass."""
        calls = self._calls.get(router)
        if calls is None:
            return
        self._settle(calls)
        if not any(past.holds for past in calls):
            del self._calls[router]
        elif calls[-1].given is not None or calls[-1].gone:
            calls.append(_Past(_number()))

    def recall(self, router: nn.Module) -> Any:
        """Return what ``router`` was given in the call that this backward pass repeats; None: it chose.

        Raises:
            RoutingError: it was given routes that are no longer held.
        """
        calls = self._calls.get(router)
        node = torch._C._current_autograd_node()
        if not calls or node is None:
            return None
        place = bisect_right(calls, node._sequence_nr(), key=lambda past: past.number)
        if place == 0:
            return None
        past = calls[place - 1]
        if past.gone:
            _raise_gone(type(router).__name__)
        past.used = True
        return past.given

    def _settle(self, calls: list[_Past]) -> None:
        """Let go of what no backward pass can need."""
        for past in calls:
            if past.given is not None and past.alive is None and past.used:
                past.given, past.gone = None, True
            elif not past.holds:  # its graph is gone, so nothing computes it again
                past.given = None
        held = [past for past in calls if past.given is not None and past.alive is None]
        for past in held[:-MOST_HELD]:
            past.given, past.gone = None, True
        # Of neighbours without routes the first one is enough.
        kept = [
            past
            for place, past in enumerate(calls)
            if place == 0
            or past.given is not None
            or calls[place - 1].given is not None
            or past.gone is not calls[place - 1].gone
        ]
        while kept and kept[0].given is None and not kept[0].gone:
            del kept[0]
        calls[:] = kept


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread: calls repeat those of a forward pass."""
    return torch._C._current_graph_task_id() != -1


def _number() -> int:
    following: int = torch._C._autograd._get_sequence_nr()
    return following if torch.is_grad_enabled() else following - 1


def _raise_gone(name: str) -> NoReturn:
    raise RoutingError(
        f"a checkpoint computes a call of {name} again whose routes are no longer held",
        where="routing.replay, in a backward pass",
        fix="run the backward pass of a replayed forward pass before the next ones, or use checkpoints with "
        "use_reentrant=False",
    )
