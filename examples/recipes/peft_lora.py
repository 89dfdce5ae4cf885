"""LoRA with PEFT on the Linear layers of a dense model."""

import veomni_hook.install  # before peft and transformers
import sys
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"

torch.manual_seed(0)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL).to(device)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for text in list(topics.values())[:8]:
    batch = tokenizer(text, truncation=True, max_length=128, return_tensors="pt").to(device)
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
print(veomni_hook.explain(model))
