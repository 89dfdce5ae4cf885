"""accelerate's own data parallelism (a script's `ParallelismConfig`) beside shared sequences."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.parallel import small
from tests.parallel.facts_of_trainer import rows
from veomni_hook.parallel import process


def accelerator(**axes: int) -> accelerate.Accelerator:
    """Return an accelerator that shards by FSDP2, which accelerate alone would do on devices only."""
    if not axes:
        return accelerate.Accelerator(cpu=True)
    own, config = accelerate.Accelerator(cpu=True), ParallelismConfig(**axes)
    own.state.parallelism_config, own.state.device_mesh = config, config.get_device_mesh("cpu")
    own.state.distributed_type = DistributedType.FSDP
    own.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    return own


def trained(batch: int, **axes: int) -> dict[str, Any]:
    """Return the losses and parameters of some steps, and what each process read."""
    own = accelerator(**axes)
    model = small.model("llama")
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    model, adam, loader = own.prepare(model, adam, DataLoader(rows(16, 1), batch_size=batch))
    losses, read = [], []
    for data in loader:
        loss = model(**data).loss
        adam.zero_grad()
        own.backward(loss)
        norm = own.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        losses.append(own.gather(loss.detach()[None]).mean().item())
        read.append(data["input_ids"][:, :4].flatten().tolist())
    parameters = {name: parameter.detach() for name, parameter in own.unwrap_model(model).named_parameters()}
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in parameters.items()}
    return {
        "losses": losses,
        "norm": float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
        "read": read,
        "sharded": sum(isinstance(parameter, DTensor) for parameter in parameters.values()),
        "sizes": str(process.sizes()),
        "parameters": {name: parameter.flatten().tolist() for name, parameter in whole.items()},
    }
