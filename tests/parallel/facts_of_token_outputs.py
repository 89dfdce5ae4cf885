"""How far fields of outputs, and a policy gradient of them, are from those of one process.

The same model runs twice in each process: whole, and with its sequences split; see `facts_of_models`.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.parallel import small
from veomni_hook.kernels.linear_cross_entropy.objective import OF_TEACHER, Teacher
from veomni_hook.kernels.linear_cross_entropy.options import TOKEN_OUTPUTS, loss_options
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.parallel import process


def step(
    model: Any, batch: dict[str, torch.Tensor], sizes: str, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    process.tell(sizes)
    model.zero_grad()
    with loss_options(temperature=0.8, **options):
        output = model(**batch)
    names = (*TOKEN_OUTPUTS, *OF_TEACHER, "loss")
    values = {name: output[name].detach() for name in names if name in output}
    loss = output.loss
    if "log_probs" in output:
        advantages = torch.linspace(-1, 1, output.log_probs.numel()).reshape(output.log_probs.shape)
        loss = loss + output.get("distillation_losses", torch.zeros(1)).square().sum()
        loss = loss + (output.log_probs.exp() * advantages).sum() - 0.1 * output.entropy.square().sum()
    loss.backward()
    return values | {f"gradient of {name}": each for name, each in small.gradients(model, sizes).items()}


def facts(sizes: str) -> dict[str, Any]:
    """Return the largest difference of each case, and how many rows of the head's product a process had."""
    set_choice("linear_cross_entropy=torch")
    found: dict[str, Any] = {}
    for kind in ("plain", "packed", "padded"):
        batch = small.batch(kind, 15)
        generator = torch.Generator().manual_seed(1)
        weights = torch.rand(batch["labels"].shape, generator=generator)
        every = torch.randn(*weights.shape, small.VOCABULARY, generator=generator).log_softmax(-1)
        teacher = Teacher(*reversed(every.topk(4)))
        for name, options in {
            "fields": {"token_outputs": True},
            "weighted fields": {"token_outputs": True, "loss_weights": weights},
            "smoothed fields": {"token_outputs": True, "label_smoothing": 0.1, "z_loss": 0.1},
            "weights": {"loss_weights": weights},
            "a teacher": {"teacher": teacher, "distillation": 0.3},
            "fields and a teacher": {"token_outputs": True, "teacher": teacher, "distillation": 0.3},
            "report": {"token_outputs": True, "entropy": True},
        }.items():
            model = small.model("llama")
            one, split = (step(model, batch, each, options) for each in ("", sizes))
            assert len(one) > 15 + 3 * ("token_outputs" in options)
            found[f"{kind}/{name}"] = small.worst(split, one)[0]
    return found
