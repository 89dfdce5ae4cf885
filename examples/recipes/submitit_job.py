"""A submitit job: on this machine; with `cluster="slurm"`, or without it, on a cluster."""

import sys

import submitit

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"


def train(name):
    """Train in the job, which is another process: the hook is imported here."""
    import veomni_hook.install  # before transformers
    from pydoc_data.topics import topics

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for text in list(topics.values())[:8]:
        batch = tokenizer(text, truncation=True, max_length=128, return_tensors="pt")
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, str(veomni_hook.explain(model))


executor = submitit.AutoExecutor(folder="submitit_logs", cluster="local")
executor.update_parameters(timeout_min=30)
losses, explanation = executor.submit(train, MODEL).result()
print(losses)
print(explanation)
