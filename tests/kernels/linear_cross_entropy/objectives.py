"""Losses to compare backends by, and the calls that do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from veomni_hook.kernels.linear_cross_entropy.objective import Objective, Transform, Wanted

ROWS, HIDDEN, VOCAB = 11, 16, 141
EVERYTHING = Wanted(True, True, True)
#: Gradients of entropies are small differences of what upstream rounds; all of it is in float32 at most.
TOKENS = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 6e-3}

#: By name, made for a device.
OBJECTIVES: dict[str, Callable[[str], Objective]] = {
    "plain": lambda device: Objective(),
    "num_items": lambda device: Objective(num_items=torch.tensor([9.5], device=device)),
    "ignore_index": lambda device: Objective(ignore_index=5),
    "label_smoothing": lambda device: Objective(label_smoothing=0.2),
    "z_loss": lambda device: Objective(z_loss=0.01),
    "loss_weights": lambda device: Objective(loss_weights=weights(device)),
    "weights, num_items": lambda device: Objective(loss_weights=weights(device), num_items=7),
    "scale, softcap": lambda device: Objective(transform=Transform(scale=0.7, softcap=3.0)),
    "float32": lambda device: Objective(accumulate="float32"),
    "all": lambda device: Objective(
        -100, 11, Transform(divisor=0.7, softcap=3.0), 0.2, 0.01, weights(device), "float32"
    ),
}


def weights(device: str) -> torch.Tensor:
    """Return a weight for each row, some 0."""
    made = torch.rand(ROWS)
    made[::4] = 0
    return made.to(device)


def operands(dtype, device="cpu", rows=ROWS) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return x, weight and bias, and a target with rows to ignore."""
    target = torch.randint(0, VOCAB, (rows,))
    target[1::5] = -100
    given = [torch.randn(rows, HIDDEN), torch.randn(VOCAB, HIDDEN) * 0.3, torch.randn(VOCAB)]
    return [each.to(device, dtype) for each in given], target.to(device)


def loss_of(module, target, objective, wanted=EVERYTHING):
    """Return a function of x, weight (and bias) to the loss and, as numbers, what else ``module`` finds."""

    def call(x, weight, bias=None):
        target_ = target.where(target != -100, objective.ignore_index)
        loss, found = module.loss_and_statistics(x, weight, bias, target_, objective, wanted)
        return loss, *numbers(found)

    return call


def tokens_of(module, target, objective, wanted):
    """Return a function of x, weight (and bias) to the statistics of ``module``, as numbers."""
    return lambda x, weight, bias=None: numbers(
        module.token_statistics(x, weight, bias, target, objective, wanted)
    )


def numbers(found):
    """Return statistics that are there; of a prediction, what it says, since equal logits may swap."""
    return tuple(each for each in found[:2] if each is not None)
