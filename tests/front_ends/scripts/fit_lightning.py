"""A causal language model in Lightning's Trainer: the model's folder is the argument."""

import json
import sys
from pathlib import Path

import lightning
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Causal(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder).train()

    def training_step(self, batch):
        return self.model(**batch, labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
rows = json.loads(Path("rows.json").read_text(encoding="utf-8"))
batches = torch.utils.data.DataLoader(
    [row["text"] for row in rows],
    batch_size=4,
    collate_fn=lambda texts: dict(tokenizer(texts, truncation=True, max_length=64, return_tensors="pt")),
)
causal = Causal(folder)
lightning.Trainer(max_steps=5, accelerator="cpu", logger=False, enable_checkpointing=False).fit(
    causal, batches
)
causal.model.save_pretrained("out")
