"""DistributedDataParallel: `torchrun --nproc_per_node 2 torchrun_ddp.py`."""

import veomni_hook.install  # before transformers
import sys
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = sys.argv[1] if sys.argv[1:] else "Qwen/Qwen3-0.6B"

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL).to(device).train()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
losses = []
for text in list(topics.values())[rank : 8 * ranks : ranks]:
    batch = tokenizer(text, truncation=True, max_length=128, return_tensors="pt").to(device)
    loss = wrapped(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if rank == 0:
    print(losses)
    print(veomni_hook.explain(model))
dist.destroy_process_group()
