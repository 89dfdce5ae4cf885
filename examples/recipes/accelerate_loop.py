"""A loop with accelerate; `accelerate launch` and `torchrun` start it as they do without the hook."""

import veomni_hook.install  # before transformers
import sys
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"

accelerator = Accelerator(gradient_accumulation_steps=2)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL).train()
dataset = [tokenizer(text, truncation=True, max_length=128) for text in list(topics.values())[:16]]
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = torch.utils.data.DataLoader(dataset, batch_size=2, collate_fn=collator)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
accelerator.print(losses)
accelerator.print(veomni_hook.explain(model))
