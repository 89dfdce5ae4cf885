"""Cases of Trainer's checkpoints that go from one kind of job to another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, DistributedType
from torch.distributed.checkpoint.api import CheckpointException

from tests.parallel.experts import models
from veomni_hook.parallel import process

#: Steps, of which the first half is in the checkpoint, and the rows of each.
STEPS, ROWS = 4, 4


def train(folder: Path, saved_by: str, kind: str, join: Callable[[], None], *, resumes: bool) -> Any:
    """Train as one ``kind`` of job for all steps, or for the second half from the checkpoint of another.

    Returns the losses and learning rates of the second half, or what an error said.
    """
    if kind != "plain":
        join()
    world = dist.get_world_size() if dist.is_initialized() else 1
    data = [{name: values[0] for name, values in models.batch(number).items()} for number in range(16)]
    output = folder / saved_by
    with on_cpus():
        arguments = transformers.TrainingArguments(
            str(folder / f"{saved_by} {kind}" if resumes else output), max_steps=STEPS, save_strategy="steps",
            save_steps=STEPS // 2, per_device_train_batch_size=ROWS * process.sizes().sp // world, weight_decay=0.1,
            learning_rate=1e-2, max_grad_norm=0.1, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
            ddp_find_unused_parameters=False, **(FSDP if kind == "FSDP2" else {}),
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        try:
            trainer.train(
                resume_from_checkpoint=str(output / f"checkpoint-{STEPS // 2}") if resumes else None
            )
        except (Exception, CheckpointException) as error:
            return str(error)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] > STEPS // 2]
    return [[entry[name] for entry in entries] for name in ("loss", "learning_rate", "grad_norm")]


FSDP: dict[str, Any] = {
    "fsdp": "full_shard",
    "fsdp_config": {
        "fsdp_version": 2,
        "state_dict_type": "SHARDED_STATE_DICT",
        "transformer_layer_cls_to_wrap": ["GptOssDecoderLayer"],
    },
}


@contextlib.contextmanager
def on_cpus() -> Iterator[None]:
    """Let accelerate use FSDP on CPUs, and older releases of transformers load a DDP's optimizer there."""
    init, load = AcceleratorState.__init__, torch.load

    def change(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    def read(file: Any, map_location: Any = None, **options: Any) -> Any:
        return load(file, "cpu" if str(map_location) == "cpu:0" else map_location, **options)

    with (
        mock.patch.object(AcceleratorState, "__init__", change),
        mock.patch.object(torch, "load", read),
    ):
        yield
