"""Ray Train: two workers with DistributedDataParallel."""

import os
import sys

import ray.train
from ray.train.torch import TorchTrainer, prepare_model

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"


def train(config):
    """Train in a worker, which is another process: the hook is imported here."""
    import veomni_hook.install  # before transformers
    from pydoc_data.topics import topics

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config["model"])
    model = prepare_model(AutoModelForCausalLM.from_pretrained(config["model"]).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for text in list(topics.values())[ray.train.get_context().get_world_rank() : 16 : 2]:
        batch = tokenizer(text, truncation=True, max_length=128, return_tensors="pt").to(model.device)
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, str(veomni_hook.explain(model))


workers = ray.train.ScalingConfig(num_workers=2)
where = ray.train.RunConfig(storage_path=os.path.abspath("out"))
trained = TorchTrainer(train, train_loop_config={"model": MODEL}, scaling_config=workers, run_config=where)
losses, explanation = trained.fit().return_value
print(losses)
print(explanation)
