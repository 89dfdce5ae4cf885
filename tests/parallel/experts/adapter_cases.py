"""Cases of PEFT's adapters on models whose experts are divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers

from tests.parallel.experts import models
from tests.parallel.experts.checkpoint_cases import on_cpus
from veomni_hook.errors import ParallelError
from veomni_hook.parallel import process

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}


def adapted(model: Any, seed: int, **options: Any) -> Any:
    """Add an adapter that differs from zero."""
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **options))


def gradients(folder: Path) -> dict[str, Any]:
    """Two passes with gradients, and the adapter's file, against one process; ranks have other seeds."""
    path, world, rank = models.saved(folder, "Qwen3Moe"), dist.get_world_size(), dist.get_rank()
    whole = adapted(models.whole(path, "Qwen3Moe"), 0, **ATTENTION)
    with models.told(""):
        losses = [whole(**models.batch(number)).loss for number in range(world)]
        (2 * sum(losses) / world).backward()
    models.set_choice(models.OURS)
    model = adapted(transformers.AutoModelForCausalLM.from_pretrained(path).train(), rank, **ATTENTION)
    for _ in range(2):
        loss = model(**models.batch(rank)).loss
        loss.backward()
    if rank == 0:
        whole.save_pretrained(folder / "one")
    model.save_pretrained(folder / f"rank {rank}")
    dist.barrier()
    one, own = (peft.load_peft_weights(str(folder / name), device="cpu") for name in ("one", f"rank {rank}"))
    return {
        "loss": abs(loss.item() - losses[rank].item()),
        "gradients": max(models.apart(models.gradients(model), models.gradients(whole)).values()),
        "file": max(models.apart(own, one).values()),
        "count": len(own),
    }


def refusal(folder: Path) -> str:
    """Return what the first forward of a model with an adapter of its experts says."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models.saved(folder, "Qwen3Moe"))
    model = adapted(model, 0, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    try:
        model(**models.batch(0))
    except ParallelError as error:
        return str(error)
    return ""


def trained(folder: Path, output: Path, resume: str | None = None) -> Any:
    """Train an adapter with Trainer; the second half again with ``resume``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "Qwen3Moe")
    data = [{name: values[0] for name, values in models.batch(number).items()} for number in range(16)]
    arguments = transformers.TrainingArguments(
        str(output), max_steps=4, save_strategy="steps", save_steps=2, learning_rate=1e-2, logging_steps=1,
        per_device_train_batch_size=4 // dist.get_world_size(), use_cpu=True, report_to="none", disable_tqdm=True,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer = transformers.Trainer(adapted(model, 0, **ATTENTION), arguments, train_dataset=data)
    with on_cpus():
        trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_trainer(folder: Path) -> dict[str, Any]:
    """Losses of Trainer under the setting, and of the same processes with DDP."""
    models.saved(folder, "Qwen3Moe")
    models.set_choice(models.OURS)
    ours = trained(folder, folder / "adapter")
    resumed = trained(folder, folder / "again", str(folder / "adapter" / "checkpoint-2"))
    with models.told(""):
        theirs = trained(folder, folder / "adapter DDP")
        on = trained(folder, folder / "adapter whole", str(folder / "adapter" / "checkpoint-2"))
    assert process.sizes().ep == 2
    return {"ours": ours, "theirs": theirs, "resumed": resumed, "on": on}
