"""Ray Train: two workers with DistributedDataParallel."""

import os
import sys

import ray
import ray.train
from ray.train.torch import TorchTrainer, prepare_model

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"


def train(config):
    """Train in a worker, which is another process: the hook is imported here."""
    import veomni_hook.install  # before transformers
    import veomni_hook.parallel
    from pydoc_data.topics import topics

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config["model"])
    model = prepare_model(AutoModelForCausalLM.from_pretrained(config["model"]).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    index, count = veomni_hook.parallel.data_shard()  # workers that share sequences read the same
    losses = []
    for text in list(topics.values())[index : 8 * count : count]:
        batch = tokenizer(text, truncation=True, max_length=128, return_tensors="pt").to(model.device)
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, str(veomni_hook.explain(model))


settings = {name: value for name, value in os.environ.items() if name.startswith("VEOMNI_")}
ray.init(runtime_env={"env_vars": settings})  # a cluster that is running has its own environment
workers = ray.train.ScalingConfig(num_workers=2)
where = ray.train.RunConfig(storage_path=os.path.abspath("out"))
trained = TorchTrainer(train, train_loop_config={"model": MODEL}, scaling_config=workers, run_config=where)
losses, explanation = trained.fit().return_value
print(losses)
print(explanation)
