"""A process of `lora_step_gpu` that trains with Unsloth: its loader, its adapters, its step."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._families import Family
from benchmarks._family_worker import serve
from benchmarks._lora_worker import CHECKPOINTED, LoraWorker

#: Its offloaded checkpointing, or none.
_CHECKPOINTING = "unsloth" if CHECKPOINTED else False


class UnslothWorker(LoraWorker):
    """A `LoraWorker` whose model is Unsloth's."""

    def __init__(self, device: str) -> None:
        self.folder = TemporaryDirectory()
        os.environ["UNSLOTH_COMPILE_LOCATION"] = self.folder.name  # else it writes into this repository
        os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
        import unsloth  # before transformers, whose code it replaces

        self.version = unsloth.__version__
        super().__init__(device)

    def build(self, family: list[Any], side: str) -> dict[str, Any]:
        """Make the model of a `Case` and run the first step."""
        return super().build(family, side) | {"unsloth": self.version}

    def _with_adapters(self, **options: Any) -> Any:
        """Return Unsloth's model with the weights of the model, which is freed, and with adapters."""
        import torch
        from unsloth import FastLanguageModel

        checkpoint = Path(self.folder.name) / "checkpoint"
        self.model.save_pretrained(checkpoint)
        self.model = None
        _save_tokenizer(checkpoint)
        loaded, _ = FastLanguageModel.from_pretrained(
            str(checkpoint),
            max_seq_length=_most_tokens(self.case.family),
            dtype=torch.bfloat16,
            load_in_4bit=False,
            use_gradient_checkpointing=_CHECKPOINTING,
        )
        return FastLanguageModel.get_peft_model(
            loaded, lora_dropout=0, use_gradient_checkpointing=_CHECKPOINTING, **options
        )

    def _checkpoint(self) -> None:
        """Do nothing: its loader was told."""


def _most_tokens(family: Family) -> int:
    """Return the most tokens of a sequence: those that the config names, or those of the step."""
    return int(family.fields.get("max_position_embeddings", family.length))


def _save_tokenizer(folder: Path) -> None:
    """Save the least tokenizer that Unsloth's loader accepts: the step needs none."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    pad, end = names = ("<|endoftext|>", "<|im_end|>")
    words = WordLevel({name: index for index, name in enumerate(names)}, unk_token=pad)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token=pad, eos_token=end, unk_token=pad
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    serve(UnslothWorker)
