"""What is decided in a call, for a checkpoint that runs the call again.

A non-reentrant checkpoint (``torch.utils.checkpoint``) expects the recomputation to save the tensors that the
forward pass saved. So a decision that depends on anything but the operands is made once: the forward pass
notes it with the checkpoint's frame, and the recomputation gets it back, whatever was chosen, read or
registered in between. Calls that ask with the same key are told apart by their order. Which pass runs is
known from the hooks for saved tensors that a checkpoint has in force; their closures hold the frame. Before
torch 2.8 it is not known, and every decision is made again. A reentrant checkpoint compares nothing, and its
decisions are made again, too. It runs its first pass without gradients, in an autograd function's forward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable
from threading import get_ident
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint

__all__ = ["decided", "hooks_in_force", "in_first_pass", "in_region"]

Decision = TypeVar("Decision")


def _unknown(ignore_is_tracing: bool) -> None:
    """Return None: releases of torch before 2.8 do not tell which hooks are in force."""


#: The hooks for saved tensors in force in this thread, or None; every guard asks.
hooks_in_force = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", _unknown)
_HOME = checkpoint.__name__
#: The function that runs a first pass, by its name: DeepSpeed's and Megatron's checkpoints have torch's.
_FIRST = checkpoint.CheckpointFunction.forward.__qualname__
_next_node = torch._C._autograd._get_sequence_nr
#: Where `in_first_pass` was asked last: the thread, the number of autograd's next node there, and the answer.
_asked: tuple[int, int, bool] = (0, -1, False)
#: Of a frame: the decisions of its forward pass. Of a hook for saved tensors: the `Decisions` of its pass.
_NOTED = "_veomni_hook_decisions"


class Decisions:
    """The decisions of one pass through a checkpoint's region, by key; ``again`` if it is a recomputation."""

    def __init__(self, noted: dict[Hashable, list[Any]], *, again: bool) -> None:
        self._noted = noted
        self._again = again
        self._places: dict[Hashable, int] = {}

    def settle(self, key: Hashable, decide: Callable[[], Decision]) -> Decision:
        """Return what was decided for this call of ``key``, or else what ``decide`` returns."""
        noted: list[Decision] = self._noted.setdefault(key, [])
        if not self._again:
            noted.append(decision := decide())
            return decision
        place = self._places[key] = self._places.get(key, -1) + 1
        return noted[place] if place < len(noted) else decide()


def in_region() -> bool:
    """Return whether a non-reentrant checkpoint runs its region here, for the first time or again."""
    return _decisions() is not None


def decided(key: Hashable, decide: Callable[[], Decision]) -> Decision:
    """Return what ``decide`` returns, or returned in the forward pass that a checkpoint repeats here."""
    decisions = _decisions()
    return decide() if decisions is None else decisions.settle(key, decide)


def in_first_pass() -> bool:
    """Return whether a reentrant checkpoint runs its first pass here; to be asked without gradients.

    A checkpoint makes its node before it runs the pass, and no other is made without gradients. So all calls
    of a pass, or of a whole evaluation, get the same number, and the stack is searched once.
    """
    global _asked  # noqa: PLW0603 - torch's number is of the thread, too
    thread, node, answer = _asked
    if node == (here := _next_node()) and thread == get_ident():
        return answer
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_qualname != _FIRST:
        frame = frame.f_back
    # Within `torch.no_grad` there is no node behind it, and no second pass.
    answer = frame is not None and bool(frame.f_locals["ctx"].next_functions)
    _asked = get_ident(), here, answer
    return answer


def _decisions() -> Decisions | None:
    hooks = hooks_in_force(False)
    if hooks is None or type(hooks[0]) is not FunctionType:
        return None
    noted = vars(hooks[0])
    if _NOTED not in noted:
        noted[_NOTED] = _decisions_of(hooks[0])
    decisions: Decisions | None = noted[_NOTED]
    return decisions


def _decisions_of(hook: FunctionType) -> Decisions | None:
    """Return the decisions of the checkpoint's pass whose hook packs saved tensors; None: it is another's."""
    pack: Any = inspect.unwrap(hook)  # torch.compiler.disable wraps the one of a recomputation
    if pack.__module__ != _HOME:
        return None
    variables = inspect.getclosurevars(pack).nonlocals
    again = "target_frame_ref" in variables
    frame = variables["target_frame_ref"]() if again else variables.get("frame")
    return None if frame is None else Decisions(vars(frame).setdefault(_NOTED, {}), again=again)
