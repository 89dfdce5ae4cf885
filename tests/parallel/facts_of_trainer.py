"""What Trainer logs for a few steps and an evaluation, with the script's usual arguments."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from tests.parallel import small


def rows(count: int, ignored: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for place in range(count):
        ids = torch.randint(3, small.VOCABULARY, (16,), generator=generator)
        labels = ids.clone()
        labels[: place % ignored] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def logged() -> dict[str, Any]:
    """Train, evaluate and predict."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=3, per_device_train_batch_size=2, per_device_eval_batch_size=1,
            gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = Trainer(small.model("llama"), arguments, train_dataset=rows(32, 5), eval_dataset=rows(6, 1))
        trainer.train()
        seen = trainer.predict(rows(6, 1))
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in entries],
        "norms": [float(entry["grad_norm"]) for entry in entries],
        "evaluated": seen.metrics["test_loss"],
        "predictions": list(seen.predictions.shape),
    }
