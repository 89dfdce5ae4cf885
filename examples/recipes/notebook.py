"""A notebook. `python -m scripts.recipes` makes notebook.ipynb of this file, one cell a `# %%`."""

# %%
import veomni_hook.install  # in the first cell, before transformers

# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = "Qwen/Qwen3-0.6B"
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

# %%
from pydoc_data.topics import topics

losses = []
for text in list(topics.values())[:8]:
    batch = tokenizer(text, truncation=True, max_length=128, return_tensors="pt").to(device)
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
losses

# %%
veomni_hook.explain(model)
