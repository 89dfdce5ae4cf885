"""A language model's loss and a teacher's k most probable tokens, from hidden states.

``ours`` has the divergence as a part of the loss, ``ours, fields`` as a number of each token, whose gradient
is not known before the caller's loss is: a fourth product. Their time is to be at most 1.15 times that of
``without a teacher`` and of ``fields without``, which compute the same of the labels alone. ``eager`` makes
the logits of all positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from veomni_hook import accelerator
from veomni_hook.kernels.linear_cross_entropy.bench import products
from veomni_hook.kernels.linear_cross_entropy.functional import linear_cross_entropy, token_log_probs
from veomni_hook.kernels.linear_cross_entropy.objective import Teacher
from veomni_hook.kernels.problem import Problem, Side, made
from veomni_hook.kernels.selection.registry import load_attribute

__all__ = ["problems"]

# Rows, hidden size, vocabulary.
_ACCELERATOR = ((8192, 4096, 151936), (16384, 4096, 151936), (16384, 2048, 151936))
_CPU = ((256, 64, 16000),)
_K, _SHARE = 64, 0.5


class _Given(NamedTuple):
    """What has no gradient."""

    target: Tensor
    teacher: Teacher | None


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    dtype = torch.bfloat16 if device in accelerator.TYPES else torch.float32
    for rows, hidden, vocab in sizes[:2] if quick else sizes:
        x = made(rows, hidden, device=device, dtype=dtype)
        weight = made(vocab, hidden, device=device, dtype=dtype) * 0.02
        ids = torch.randint(0, vocab, (rows, _K), device=device)
        log_probs = made(rows, _K, device=device, dtype=torch.float32).log_softmax(-1)
        given = _Given(torch.randint(0, vocab, (rows,), device=device), Teacher(ids, log_probs))
        yield Problem(
            op="linear_cross_entropy_distillation",
            shape=f"{rows} x {hidden} x {vocab}, k = {_K}",
            leaves=(x, weight),
            sides=_sides(given),
            limit="products",
            work={"step": 6 * rows * hidden * vocab},
            products=partial(products, wide=weight),
        )


def _sides(given: _Given) -> dict[str, Side]:
    sides: dict[str, Side] = {"eager": partial(upstream, given=given)}
    if find_spec("veomni") is not None:
        sides["veomni, fields"] = partial(_veomni, given=given)
    return {
        **sides,
        "without a teacher": partial(linear_cross_entropy, target=given.target),
        "fields without": partial(_fields, given=given._replace(teacher=None)),
        "ours, fields": partial(_fields, given=given),
        "ours": partial(
            linear_cross_entropy, target=given.target, teacher=given.teacher, distillation=_SHARE
        ),
    }


def upstream(x: Tensor, weight: Tensor, given: _Given) -> Tensor:
    """Return the loss from the logits of all positions."""
    assert given.teacher is not None  # noqa: S101
    logits = functional.linear(x, weight).float()
    ids, log_probs, _ = given.teacher
    student = logits.log_softmax(-1).gather(-1, ids)
    divergence = (log_probs.exp() * (log_probs - student)).sum(-1).mean()
    return functional.cross_entropy(logits, given.target) * (1 - _SHARE) + divergence * _SHARE


def _fields(x: Tensor, weight: Tensor, given: _Given) -> Tensor:
    found = token_log_probs(x, weight, given.target, entropy=True, teacher=given.teacher)
    return _loss(found.log_probs, found.distillation_losses)


def _veomni(x: Tensor, weight: Tensor, given: _Given) -> Tensor:
    assert given.teacher is not None  # noqa: S101
    function = load_attribute("veomni.ops.kernels.cross_entropy:chunk_topk_distill_function")
    found = function(x, weight, given.target, *given.teacher[:2], shift_labels=given.target)
    return _loss(found[0], found[2])


def _loss(log_probs: Tensor | None, divergence: Tensor | None) -> Tensor:
    assert log_probs is not None  # noqa: S101
    loss = -log_probs.mean()
    return loss if divergence is None else loss.lerp(divergence.mean(), _SHARE)
