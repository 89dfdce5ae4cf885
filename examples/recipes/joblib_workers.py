"""joblib with its default backend, loky: `children=True` gives every child process the hook."""

import sys

import joblib
import veomni_hook

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"


def train(name, rate):
    """Train in a worker, which imports transformers by itself, patched."""
    from pydoc_data.topics import topics

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    for text in list(topics.values())[:8]:
        batch = tokenizer(text, truncation=True, max_length=128, return_tensors="pt")
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, str(veomni_hook.explain(model))


veomni_hook.activate(children=True)
runs = joblib.Parallel(n_jobs=2)(joblib.delayed(train)(MODEL, rate) for rate in (1e-4, 1e-3))
for losses, explanation in runs:
    print(losses)
    print(explanation)
