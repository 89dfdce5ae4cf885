"""What blocks of the documents may use without defining it: a small model, a teacher, data, a checkpoint on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

CHECKPOINT = "Qwen/Qwen3-0.6B"
CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Two rows of eight tokens."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(8) + number
        return {"input_ids": tokens, "labels": tokens}


def save_checkpoint() -> None:
    """Put a small checkpoint where `from_pretrained` looks for a name before it asks the model hub."""
    Qwen3ForCausalLM(Qwen3Config(**CONFIG)).save_pretrained(Path(CHECKPOINT))


def names() -> dict[str, Any]:
    """Return them for one document."""
    model, teacher, reference = (Qwen3ForCausalLM(Qwen3Config(**CONFIG)) for _ in range(3))
    tokens = torch.arange(16).reshape(2, 8)
    return {
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
        "batch": {"input_ids": tokens, "labels": tokens},
        "dataset": Rows(),
        "model": model,
        "path": CHECKPOINT,
        "reference": reference,
        "student": model,
        "teacher": teacher,
    }
