"""Tells which of transformers' losses a model has: one of the two known ones, or another.

The same keywords have an effect as in those two: ``num_items_in_batch``, ``ignore_index`` and (for next-token
labels) ``shift_labels``; all others are ignored there and so here. A loss function is trusted once it returns
the expected results for small test inputs, and as long as its code and the code it calls stay the same:
Liger, Unsloth and users may replace parts of it at any time.

VeOmni puts its own loss into transformers' table of losses. It is that of next-token labels, but returns
three values, which only VeOmni's modeling code takes: where upstream's would call it, a kernel has to run.
"""

from __future__ import annotations

import sys
from types import CodeType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from veomni_hook.kernels.linear_cross_entropy import reference
from veomni_hook.kernels.shared.origin import underlying, written_in

__all__ = ["HOME", "PARTS", "is_veomnis", "reads_shift_labels", "refuses", "targets"]

#: Where transformers' own losses are.
HOME = "transformers.loss.loss_utils"
_NEXT_TOKEN = "ForCausalLMLoss"
_SAME_TOKEN = "ForMaskedLMLoss"
_PART = "fixed_cross_entropy"
_OPERATION = ("torch.nn.functional", "cross_entropy")
_VEOMNI, _PARALLEL = "veomni.ops.kernels.cross_entropy", "veomni.distributed.parallel_state"
_OF_VEOMNI = tuple((_VEOMNI, name) for name in (_NEXT_TOKEN, "_chunk_loss_dispatch"))


#: Functions that returned the expected results, and the code they had then.
_trusted: WeakKeyDictionary[Any, CodeType] = WeakKeyDictionary()
#: The functions they call, as attributes, which dynamo reads one by one.
PARTS = SimpleNamespace(part=None, operation=None)


def refuses(loss_function: Any) -> str | None:
    """Return why ``loss_function`` is neither of the two, or None."""
    if is_veomnis(loss_function):
        split = sys.modules[_PARALLEL].get_parallel_state().sp_enabled
        return "VeOmni splits the sequences, and its loss has labels of its own" if split else None
    try:
        code = _trusted[loss_function]
    except (KeyError, TypeError):
        code = None
    if code is not None and code is loss_function.__code__:
        part = getattr(loss_function.__globals__.get(_PART), "__code__", None)
        if part is PARTS.part and functional.cross_entropy is PARTS.operation:
            return None
    reason = _examine(loss_function)
    if reason is None:
        _trusted[loss_function] = loss_function.__code__
        PARTS.part = loss_function.__globals__[_PART].__code__
        PARTS.operation = functional.cross_entropy
    return reason


def is_veomnis(loss_function: object) -> bool:
    """Return whether it is VeOmni's, which upstream's code cannot call."""
    return _VEOMNI in sys.modules and written_in(underlying(loss_function)) in _OF_VEOMNI


def reads_shift_labels(loss_function: object) -> bool:
    """Return whether it uses next-token labels, which a caller may have shifted already."""
    return getattr(loss_function, "__qualname__", type(loss_function).__qualname__) != _SAME_TOKEN


def targets(
    loss_function: object, labels: Any, shift_labels: torch.Tensor | None, ignore_index: float
) -> torch.Tensor:
    """Return the label of each position, ``[rows]``, as ``loss_function`` determines it."""
    if not reads_shift_labels(loss_function):
        return labels.reshape(-1)  # type: ignore[no-any-return]
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def _examine(loss_function: Any) -> str | None:
    """Return why a loss function is neither of the two, judged by its origin and its results, or None."""
    home, name = written_in(loss_function)
    if home != HOME or name not in (_NEXT_TOKEN, _SAME_TOKEN):
        return f"the model has its own loss_function ({'.'.join((home, name))})"
    part = written_in(loss_function.__globals__.get(_PART))
    if part != (HOME, _PART):
        return f"transformers' {_PART} was replaced by {'.'.join(part)}"
    if written_in(functional.cross_entropy) != _OPERATION:
        return f"{'.'.join(_OPERATION)} was replaced by {'.'.join(written_in(functional.cross_entropy))}"
    # Autocast would round the logits of one side, and numbers of fake tensors cannot be compared.
    with torch.autocast("cpu", enabled=False), _disable_current_modes():
        return _questioned(loss_function, name)


def _questioned(loss_function: Any, name: str) -> str | None:
    """Return which expected result a loss function does not return, or None."""
    logits = torch.arange(20, dtype=torch.float32, device="cpu").sin().reshape(1, 4, 5)
    labels = torch.tensor([[1, 4, -100, 2]], device="cpu")
    shifted = torch.tensor([[3, 4, 0, 1]], device="cpu")
    questions: tuple[dict[str, Any], ...] = (
        {},
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(5, device="cpu"), "ignore_index": 4, "shift_labels": shifted},
        {"shift_labels": shifted, "position_ids": None, "label_smoothing": 0.5},
    )
    for question in questions:
        ignore_index = question.get("ignore_index", -100)
        checked = labels if name == _NEXT_TOKEN else labels.where(labels != -100, ignore_index)
        expected = reference.linear_cross_entropy(
            logits.reshape(-1, 5),
            torch.eye(5, dtype=torch.float32, device="cpu"),
            None,
            targets(loss_function, checked, question.get("shift_labels"), ignore_index),
            ignore_index=ignore_index,
            num_items=question.get("num_items_in_batch"),
        )
        try:
            answer = loss_function(logits=logits, labels=checked, vocab_size=5, **question)
        except Exception as error:
            return f"transformers' {name} raised {type(error).__name__} in a test call"
        if not torch.allclose(answer, expected, rtol=1e-4, atol=1e-5):
            return f"transformers' {name} returned an unexpected loss in a test call with {sorted(question)}"
    return None
