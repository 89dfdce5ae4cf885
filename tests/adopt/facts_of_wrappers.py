"""Prints, as JSON, what adopting does inside wrappers of other libraries; run by test_wrappers.py."""

from __future__ import annotations

import json
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from tests.adopt.small import IDS, make, ran, step

warnings.simplefilter("ignore")
facts: dict[str, object] = {}
before = step(make())

import veomni_hook  # noqa: E402 - late, which is what this is about
from veomni_hook.integrations.trainer import VeomniCallback  # noqa: E402


class Tokens(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"input_ids": IDS[index % 2], "labels": IDS[index % 2]}


def train(folder, *, callbacks=(), **model):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=2, report_to="none", logging_steps=1, save_strategy="no",
        disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(args=arguments, train_dataset=Tokens(), callbacks=[*callbacks], **model)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


with tempfile.TemporaryDirectory() as folder:
    _, plain = train(folder, model=make())
    callback = VeomniCallback()
    trainer, losses = train(folder, model=make(), callbacks=[callback])
    made = VeomniCallback()
    remade, again = train(folder, model_init=lambda: make(), callbacks=[made])
    facts["trainer"] = {
        "losses": max(abs(one - other) for one, other in zip(plain, losses, strict=True)),
        "ran": ran(veomni_hook.explain(trainer.model)),
        "adopted": bool(callback.report),
        "activated": [callback.handle is not None, made.handle is not None],
        "model_init": max(abs(one - other) for one, other in zip(plain, again, strict=True)),
        "model_init ran": ran(veomni_hook.explain(remade.model)),
    }

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel = DistributedDataParallel(make())
    veomni_hook.adopt(parallel)
    result = step(parallel)
    facts["ddp"] = {"difference": abs(before[0] - result[0]), "ran": ran(veomni_hook.explain(parallel))}
    sharded = make()
    veomni_hook.adopt(sharded)
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    loss = sharded(input_ids=IDS, labels=IDS).loss
    loss.backward()
    facts["fsdp2"] = {
        "difference": abs(before[0] - loss.item()),
        "ran": ran(veomni_hook.explain(sharded)),
        "names": [type(sharded).__name__, type(sharded.model.layers[0]).__name__],
    }
    late = make()
    for layer in late.model.layers:
        fully_shard(layer)
    fully_shard(late)
    report = veomni_hook.adopt(late)
    facts["fsdp2 first"] = {
        "difference": abs(before[0] - late(input_ids=IDS, labels=IDS).loss.item()),
        "refused": {each.kind: each.reason for each in report.refused},
        "adopted": sorted(each.kind for each in report.adopted),
    }
    dist.destroy_process_group()

compiled = make()
run = torch.compile(compiled, backend="eager")
run(input_ids=IDS, labels=IDS)
report = veomni_hook.adopt(run)
first = run(input_ids=IDS, labels=IDS).loss.item()
facts["compiled"] = {
    "difference": abs(before[0] - first),
    "ran": ran(veomni_hook.explain(compiled)),
    "adopted": bool(report),
}
report.undo()
facts["compiled"]["undone"] = abs(before[0] - run(input_ids=IDS, labels=IDS).loss.item())

from peft import LoraConfig, get_peft_model  # noqa: E402

torch.manual_seed(1)
lora = get_peft_model(make(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
reference = lora(input_ids=IDS, labels=IDS).loss.item()
report = veomni_hook.adopt(lora)
facts["peft"] = {
    "difference": abs(reference - lora(input_ids=IDS, labels=IDS).loss.item()),
    "ran": ran(veomni_hook.explain(lora)),
    "refused": [each.kind for each in report.refused],
}

from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # noqa: E402

dispatched = make()
add_hook_to_module(dispatched.model.layers[0].mlp, AlignDevicesHook(execution_device="cpu"))
report = veomni_hook.adopt(dispatched)
facts["accelerate"] = [(each.kind, each.reason) for each in report.refused]
print(json.dumps(facts))
