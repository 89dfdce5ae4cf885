"""Direct preference optimisation with TRL."""

import veomni_hook.install  # before trl and transformers
import sys
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"

words = [text.split() for text in list(topics.values())[:64]]
pairs = [
    {
        "prompt": " ".join(each[:20]),
        "chosen": " " + " ".join(each[20:40]),
        "rejected": " " + " ".join(each[40:60]),
    }
    for each in words
]
bf16 = torch.cuda.is_available()  # the default of TRL; a CPU computes in float32
args = DPOConfig("out", bf16=bf16, max_length=128, max_steps=8, logging_steps=1, save_strategy="no")
trainer = DPOTrainer(MODEL, args=args, train_dataset=Dataset.from_list(pairs))
trainer.train()
print(veomni_hook.explain(trainer.model))
