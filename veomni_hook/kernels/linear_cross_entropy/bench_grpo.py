"""The loss of a step of GRPO, from hidden states: log-probabilities of a policy and of its reference.

Sides: logits of all positions (``eager``), a sequence at a time under a checkpoint (``by sequence``), the
function of TRL's trainers and Liger's fused loss where they are installed, and `veomni_hook.token_log_probs`.
The limit is the time of the products that cannot be left out:
one for the reference, and three for the policy. `token_log_probs` takes a fourth, because a gradient of
log-probabilities is not known before the loss is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from veomni_hook import accelerator
from veomni_hook.kernels.linear_cross_entropy.functional import token_log_probs
from veomni_hook.kernels.problem import Problem, Side, made

__all__ = ["problems"]

Tensor = torch.Tensor
# Sequences, positions, hidden size, vocabulary.
_ACCELERATOR = ((16, 1024, 4096, 151936), (8, 2048, 2048, 151936))
_CPU = ((2, 128, 64, 4000),)
_BETA, _CLIP = 0.04, 0.2


class _Given(NamedTuple):
    """What has no gradient: the reference, the tokens, and the advantages of sequences."""

    reference_states: Tensor
    reference_weight: Tensor
    tokens: Tensor
    advantages: Tensor


def problems(device: str, *, quick: bool) -> Iterator[Problem]:
    """Yield every size."""
    sizes = _ACCELERATOR if device in accelerator.TYPES else _CPU
    dtype = torch.bfloat16 if device in accelerator.TYPES else torch.float32
    for rows, positions, hidden, vocab in sizes[:2] if quick else sizes:
        states, others = (made(rows, positions, hidden, device=device, dtype=dtype) for _ in range(2))
        weight, fixed = (made(vocab, hidden, device=device, dtype=dtype) * 0.02 for _ in range(2))
        tokens = torch.randint(0, vocab, (rows, positions), device=device)
        batch = _Given(others, fixed, tokens, made(rows, device=device, dtype=torch.float32))
        work = 2 * rows * positions * hidden * vocab
        yield Problem(
            op="linear_cross_entropy_grpo",
            shape=f"{rows} x {positions} x {hidden} x {vocab}",
            leaves=(states, weight),
            sides=_sides(device, batch),
            limit="products",
            work={"step": 4 * work},
            products=partial(_products, given=batch),
        )


def _sides(device: str, batch: _Given) -> dict[str, Side]:
    sides: dict[str, Side] = {
        "eager": partial(_loss, given=batch, log_probs=_from_logits),
        "by sequence": partial(_loss, given=batch, log_probs=_by_sequence),
    }
    if device == "cuda" and find_spec("trl") is not None:
        sides["trl"] = partial(_loss, given=batch, log_probs=_trl)
    if device == "cuda" and find_spec("liger_kernel") is not None:
        sides["liger"] = partial(_liger, given=batch)
    sides["ours"] = partial(_loss, given=batch, log_probs=_ours)
    return sides


def _loss(states: Tensor, weight: Tensor, given: _Given, log_probs: Callable[..., Tensor]) -> Tensor:
    with torch.no_grad():
        reference = log_probs(given.reference_states, given.reference_weight, given.tokens)
    policy = log_probs(states, weight, given.tokens)
    ratio = torch.exp(policy - policy.detach())
    gain = given.advantages.unsqueeze(1)
    clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
    difference = reference - policy
    distance = difference.exp() - difference - 1
    return (_BETA * distance - torch.minimum(ratio * gain, clipped * gain)).mean()


def _from_logits(states: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    logits = states @ weight.t()
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() - logits.float().logsumexp(-1)


def _by_sequence(states: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    by_sequence = [
        checkpoint(_from_logits, one, weight, own, use_reentrant=False)
        for one, own in zip(states, tokens, strict=True)
    ]
    return torch.stack(by_sequence)


def _ours(states: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    log_probs = token_log_probs(states, weight, tokens).log_probs
    assert log_probs is not None  # noqa: S101
    return log_probs


def _trl(states: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """What TRL 1.16's ``add_fused_lm_head`` calls, with its own tiles and no entropies."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    rows, labels = states.flatten(0, 1), tokens.flatten()
    log_probs: Tensor = ChunkedLogProbFunction.apply(
        rows, weight, None, labels, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ()
    )[0]
    return log_probs.view(tokens.shape)


def _liger(states: Tensor, weight: Tensor, given: _Given) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    fused: Any = LigerFusedLinearGRPOLoss(
        beta=_BETA, epsilon_low=_CLIP, epsilon_high=_CLIP, loss_type="bnpo", use_ref_model=True
    )
    loss: Tensor = fused(
        states, weight, given.tokens, torch.ones_like(given.tokens), given.advantages,
        ref_input=given.reference_states, ref_weight=given.reference_weight,
    )[0]  # fmt: skip
    return loss


def _products(states: Tensor, weight: Tensor, given: _Given) -> Tensor:
    with torch.no_grad():
        of_reference = given.reference_states.flatten(0, 1) @ given.reference_weight.t()
        del of_reference
        rows = states.flatten(0, 1)
        logits = rows @ weight.t()
        logits @ weight
        return logits.t() @ rows
