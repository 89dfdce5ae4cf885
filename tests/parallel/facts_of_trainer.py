"""What Trainer logs for a few steps and an evaluation, with the script's usual arguments, and what accelerate gathers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import distributed
from torch.utils.data import DataLoader, IterableDataset
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


class Stream(IterableDataset):
    """Rows without a length; ``readers`` are the processes that read them."""

    readers: ClassVar[set[int]] = set()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for row in rows(32, 5):
            self.readers.add(distributed.get_rank() if distributed.is_initialized() else 0)
            yield row


#: Of `TrainingArguments`; with ``streamed``, the data has no length.
FEEDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streamed": {},
    "streamed, each process reads": {"accelerator_config": {"dispatch_batches": False}},
    "streamed, split": {"accelerator_config": {"split_batches": True}},
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
}


def logged(feed: str = "whole", batch: int = 2) -> dict[str, Any]:
    """Train, evaluate and predict."""
    evaluated = 4 if "split" in feed else 1
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=3, per_device_train_batch_size=batch, per_device_eval_batch_size=evaluated,
            gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, ddp_find_unused_parameters=False, include_num_input_tokens_seen="all", **FEEDS[feed],
        )  # fmt: skip
        data = Stream() if feed.startswith("streamed") else rows(32, 5)
        trainer = Trainer(small.model("llama"), arguments, train_dataset=data, eval_dataset=rows(6, 1))
        trainer.train()
        seen_tokens = trainer.state.num_input_tokens_seen
        seen = trainer.predict(rows(6, 1))
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in entries],
        "norms": [float(entry["grad_norm"]) for entry in entries],
        "evaluated": seen.metrics["test_loss"],
        "predictions": list(seen.predictions.shape),
        "tokens": seen_tokens,
        "reads": distributed.is_initialized() and distributed.get_rank() in Stream.readers,
    }


def gathered() -> dict[str, Any]:
    """What a loop gathers from a loader of 7 rows that accelerate prepares, 2 rows at a time."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader([*range(7)], batch_size=2))
    found: dict[str, list[Any]] = {"tensors": [], "objects": [], "sums": []}
    for numbers in loader:
        found["tensors"] += accelerator.gather_for_metrics({"values": [numbers]})["values"][0].tolist()
        found["objects"] += accelerator.gather_for_metrics([f"row {number}" for number in numbers.tolist()])
        found["sums"] += accelerator.gather_for_metrics(numbers.sum()).tolist()
    return found
