"""Supervised fine-tuning with TRL."""

import veomni_hook.install  # before trl and transformers
import sys
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"

dataset = Dataset.from_dict({"text": list(topics.values())[:64]})
bf16 = torch.cuda.is_available()  # the default of TRL; a CPU computes in float32
args = SFTConfig("out", bf16=bf16, max_length=128, max_steps=8, logging_steps=1, save_strategy="no")
trainer = SFTTrainer(MODEL, args=args, train_dataset=dataset)
trainer.train()
print(veomni_hook.explain(trainer.model))
