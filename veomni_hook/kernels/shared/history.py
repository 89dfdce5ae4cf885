"""What a module was given in earlier calls, for a backward pass that computes one of them again.

A checkpoint runs a part of a forward pass again while autograd runs a node of the graph: a node that was made
after the module's call, or, with a reentrant checkpoint, right before it. Autograd numbers nodes in the order
in which they are made. So the call that is repeated is the last one whose number is not above the node's, in
whichever order the forward and backward passes of several batches follow each other, and also after the block
that gave it something has ended. (Checkpoints inside of checkpoints are made again themselves: only those of
the last forward pass are found.)

What a call was given is held as long as its graph; where the graph cannot hold it (a reentrant checkpoint has
none yet, and a frozen module may have none), until it was used and the module is called again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

__all__ = ["History", "following", "in_backward"]

_KEY = "veomni_hook.given"
#: Calls without a graph that are held: no more micro-batches are between a forward and its backward.
MOST_HELD = 64


class _Token:
    """Lives as long as the graph whose node holds it."""


@dataclass
class _Past:
    """A call of a module.

    Attributes:
        number: of the first node that autograd can have made for what follows; one less without gradients.
        given: what it was given, or None.
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
    """The calls of modules, as far as a backward pass may repeat them.

    ``gone`` makes the error about a call that is repeated and whose gift, to a module of the class named, is
    no longer held.
    """

    def __init__(self, gone: Callable[[str], Exception]) -> None:
        self._gone = gone
        self._calls: WeakKeyDictionary[nn.Module, list[_Past]] = WeakKeyDictionary()

    def __bool__(self) -> bool:
        return any(past.holds for calls in self._calls.values() for past in calls)

    def note(
        self, module: nn.Module, arguments: object, output: torch.Tensor, number: int | None = None
    ) -> None:
        """Note that ``module`` was given ``arguments`` in this forward pass, and made ``output`` of it.

        ``number`` is `following` before the call; None: now.
        """
        past = _Past(following() if number is None else number, arguments)
        if output.grad_fn is not None:
            token = _Token()
            metadata: Any = output.grad_fn.metadata
            metadata[_KEY] = token
            past.alive = ref(token)
        elif not torch.is_grad_enabled() and not module.training:
            past.given = None  # evaluation: nothing is computed again
        calls = self._calls.setdefault(module, [])
        self._settle(calls)
        calls.append(past)

    def passed(self, module: nn.Module, number: int | None = None) -> None:
        """Note that ``module`` was given nothing in this forward pass; ``number`` as for `note`."""
        calls = self._calls.get(module)
        if calls is None:
            return
        self._settle(calls)
        if not any(past.holds for past in calls):
            del self._calls[module]
        elif calls[-1].given is not None or calls[-1].gone:
            calls.append(_Past(following() if number is None else number))

    def recall(self, module: nn.Module) -> Any:
        """Return what ``module`` was given in the call that this backward pass repeats; None: nothing.

        Raises:
            Exception: what it was given is no longer held.
        """
        calls = self._calls.get(module)
        node = torch._C._current_autograd_node()
        if not calls or node is None:
            return None
        place = bisect_right(calls, node._sequence_nr(), key=lambda past: past.number)
        if place == 0:
            return None
        past = calls[place - 1]
        if past.gone:
            raise self._gone(type(module).__name__)
        past.used = True
        return past.given

    def _settle(self, calls: list[_Past]) -> None:
        """Let go of what no backward pass can need."""
        for past in calls:
            if past.given is not None and past.alive is None and past.used:
                past.given, past.gone = None, True
            elif not past.holds:  # its graph is gone, so nothing computes it again
                past.given = None
        waiting = [past for past in calls if past.given is not None and past.alive is None]
        for past in waiting[:-MOST_HELD]:
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


def following() -> int:
    """Return the number of the first node that autograd can make now; one less without gradients."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number if torch.is_grad_enabled() else number - 1
