"""Group relative policy optimisation with TRL, completions from `generate`."""

import veomni_hook.install  # before trl and transformers
import sys
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"


def many_different_letters(completions, **kwargs):
    """Return a reward for each completion; yours goes here."""
    return [float(len(set(completion))) for completion in completions]


dataset = Dataset.from_list([{"prompt": text[:60]} for text in list(topics.values())[:64]])
args = GRPOConfig(
    "out", bf16=torch.cuda.is_available(), num_generations=4, max_completion_length=16, beta=0.1,
    max_steps=4, logging_steps=1, save_strategy="no", report_to="none",
)  # fmt: skip
trainer = GRPOTrainer(MODEL, reward_funcs=many_different_letters, args=args, train_dataset=dataset)
trainer.train()
print(veomni_hook.explain(trainer.model))
