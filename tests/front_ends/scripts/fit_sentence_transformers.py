"""An embedding model with SentenceTransformerTrainer: the model's folder is the argument."""

import sys

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss

model = SentenceTransformer(sys.argv[1], device="cpu")
args = SentenceTransformerTrainingArguments(
    "logs", max_steps=5, per_device_train_batch_size=4, learning_rate=1e-3, max_grad_norm=1000,
    report_to="none", save_strategy="no", use_cpu=True, seed=7,
)  # fmt: skip
rows = load_dataset("json", data_files="rows.json", split="train")
SentenceTransformerTrainer(model, args, train_dataset=rows, loss=MultipleNegativesRankingLoss(model)).train()
model.save("out")
