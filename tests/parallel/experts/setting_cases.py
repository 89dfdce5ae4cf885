"""Cases of a job with the setting ``ep=2``: scripts that do not name it."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.parallel import small
from tests.parallel.experts import models
from tests.processes import outputs, started
from veomni_hook import releases
from veomni_hook.errors import ParallelError, VeomniHookWarning
from veomni_hook.parallel import data_shard, expert_checkpoints, expert_loading
from veomni_hook.parallel.gradient_norm import by_mesh
from veomni_hook.patches import expert_release
from veomni_hook.tools.report.explanation import explain


def from_pretrained(folder: Path, family: str) -> dict[str, Any]:
    """A step of a model that a script loads as always, whose sequences processes may share, too."""
    path = models.saved(folder, family)
    index, count = data_shard()
    losses, expected = models.alone(path, family, count)
    models.set_choice(models.OURS)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).train()
    loss = model(**models.batch(index)).loss
    loss.backward()
    config = getattr(model.config, "distributed_config", None)
    return {
        "loss": abs(loss.item() - losses[index]) / abs(losses[index]),
        "gradient": max(models.apart(models.gradients(model), expected).values()),
        "explained": str(explain(model)),
        "config": config and [config.fsdp_size, config.ep_size, config.ep_implementation],
        "count": count,
    }


def turned(folder: Path) -> list[list[int]]:
    """Shapes of 2 of a parameter's 4 matrices, which the file has as the parameter does, or turned."""
    from transformers.core_model_loading import Transpose

    owner = torch.nn.Module()
    owner.weight = torch.nn.Parameter(torch.empty(4, 3, 5))
    convert, where = Transpose(1, 2, check_dims=True).convert, {"model": owner, "full_layer_name": "weight"}
    parts = torch.empty(2, 3, 5), torch.empty(2, 5, 3)
    return [[*convert({"w": [part]}, ["w"], ["w"], **where)["w"].shape] for part in parts]


def explicit(folder: Path) -> dict[str, Any]:
    """A script that gives its own config, one that gives sizes only, and one that wants the model whole."""
    from transformers.distributed import DistributedConfig

    path, sizes = models.saved(folder, "Qwen3Moe"), {}
    load = transformers.Qwen3MoeForCausalLM.from_pretrained
    for name, config in {
        "own": DistributedConfig(fsdp_size=2, ep_size=2),
        "named": DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="veomni"),
        "fsdp": DistributedConfig(fsdp_size=2),
        "whole": DistributedConfig(),
    }.items():
        found = load(path, distributed_config=config).config.distributed_config
        sizes[name] = [found.fsdp_size, found.ep_size, found.ep_implementation]
    return sizes


def replicated(folder: Path) -> dict[str, Any]:
    """A step of a model that a script divides over half of the ranks, and replicates."""
    from transformers.distributed import DistributedConfig

    path, index, count = models.saved(folder, "Qwen3Moe"), dist.get_rank(), dist.get_world_size()
    losses, expected = models.alone(path, "Qwen3Moe", count)
    models.set_choice(models.OURS)
    config = DistributedConfig(
        fsdp_size=count // 2, dp_replicate_size=2, ep_size=2, ep_implementation=expert_release.NAME
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config).train()
    loss = model(**models.batch(index)).loss
    loss.backward()
    return {
        "loss": abs(loss.item() - losses[index]) / abs(losses[index]),
        "gradient": max(models.apart(models.gradients(model), expected).values()),
        "meshes": [sorted(mesh.mesh_dim_names) for mesh in by_mesh(model.parameters())],
    }


SITUATIONS: dict[str, Any] = {
    "three ranks": lambda: models.told("ep=3"),
    "an old release": lambda: mock.patch.object(releases, "installed", return_value="5.8rc1"),
    "offload": lambda: mock.patch.dict(os.environ, {"FSDP_OFFLOAD_PARAMS": "true"}),
}
OPTIONS: dict[str, dict[str, Any]] = {"several devices": {"device_map": "auto"}}
MODELS: dict[str, Any] = {
    "an odd number of experts": lambda: models.small("Qwen3Moe", num_experts=7),
    "identity experts": lambda: models.small("LongcatFlash", zero_expert_num=4),
    "no experts": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**models.COMMON, head_dim=8, intermediate_size=24)
    ),
}


def refusal(folder: Path, of: str) -> str:
    """Return the error of a script that cannot have experts on two ranks."""
    path = folder / f"refused {of}"
    model = _other(of) if of in OTHERS else MODELS.get(of, lambda: models.small("Qwen3Moe"))()
    model.save_pretrained(path)  # on rank 0
    dist.barrier()
    with SITUATIONS.get(of, contextlib.nullcontext)():
        try:
            if of == "an old release":  # as its `from_pretrained` does
                expert_loading.divided(model, (None,), None, None)
            type(model).from_pretrained(path, **OPTIONS.get(of, {}))
        except ParallelError as error:
            return str(error)
    return "no error"


#: Sizes, and the end of the class.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Dbrx": ("CausalLM", {
        "d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 64,
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    }),
    "JetMoe": ("CausalLM", {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_key_value_heads": 2,
        "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    "NllbMoe": ("ConditionalGeneration", {
        "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_experts": 4,
        "encoder_sparse_step": 1, "decoder_sparse_step": 1,
    }),
    "SwitchTransformers": ("ConditionalGeneration", {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "num_experts": 4,
    }),
}  # fmt: skip


def _other(name: str) -> Any:
    """A model whose experts have another form."""
    kind, sizes = OTHERS[name]
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}For{kind}")(config)


def dropped_plan(folder: Path) -> dict[str, Any]:
    """The plan of recognised experts equals transformers' own, and does not need it."""
    from veomni_hook.parallel.expert_plans import plan_of

    found = {}
    for family in ("Qwen3Moe", "GptOss", "DeepseekV3"):
        with torch.device("meta"):
            model = models.small(family)
        theirs, model._ep_plan = dict(model._ep_plan), {}
        found[family] = plan_of(model, 2) == theirs
    return found


def _of_config() -> Any:
    """Return a model that is built from a config, on this rank."""
    config = transformers.Qwen3MoeConfig(**models.COMMON, **models.FAMILIES["Qwen3Moe"])
    return transformers.AutoModelForCausalLM.from_config(config)


class _Holder(torch.nn.Module):
    """A script's own module, which FSDP2 shards as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _of_config()

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def _loaded_whole(path: Path) -> Any:
    from transformers.distributed import DistributedConfig

    return transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig())


#: Models that no `from_pretrained` of the setting has divided.
WHOLE: dict[str, Callable[[Path], Any]] = {
    "alone": lambda _: _of_config(),
    "compiled": lambda _: torch.compile(_of_config(), backend="eager"),
    "copied": lambda _: copy.deepcopy(_of_config()),
    "DDP": lambda _: DistributedDataParallel(_of_config()),
    "FSDP2": lambda _: fully_shard(_of_config()),
    "FSDP2 around it": lambda _: fully_shard(_Holder()),
    "frozen": lambda _: _of_config().requires_grad_(False),
    "in evaluation": lambda _: _of_config().eval(),
    "DeepSpeed": lambda _: _of_config(),
    "dense": lambda _: MODELS["no experts"](),
    "loaded whole": _loaded_whole,
}


def whole_experts(folder: Path, how: str) -> dict[str, Any]:
    """A pass without gradients, and two with, of a model whose experts are not divided: what they say."""
    path = models.saved(folder, "Qwen3Moe")
    model = WHOLE[how](path)
    deepspeed = types.SimpleNamespace(comm=types.SimpleNamespace(is_initialized=lambda: how == "DeepSpeed"))
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.dict(sys.modules, {"deepspeed": deepspeed} if how == "DeepSpeed" else {}),
    ):
        warnings.simplefilter("always")
        with torch.no_grad():
            model(**models.batch(0))
        error = ""
        try:
            for _ in range(2):
                loss = model(**models.batch(0)).loss
        except Exception as raised:
            error = str(raised)
    said = [str(each.message) for each in caught if issubclass(each.category, VeomniHookWarning)]
    return {"error": error, "said": said, "loss": loss.item() if not error else None}


def accelerated(folder: Path) -> dict[str, Any]:
    """Two steps of a loop with accelerate, against one process."""
    from accelerate import Accelerator

    path = models.saved(folder, "Qwen3Moe")
    batches = [models.batch(rank) for rank in range(dist.get_world_size())]
    alone = models.whole(path, "Qwen3Moe")
    norms, _ = models.steps(alone, batches, torch.nn.utils.clip_grad_norm_, 2)
    models.set_choice(models.OURS)
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(path).train()
    accelerator = Accelerator(cpu=True)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, adam = accelerator.prepare(model, adam)
    found = []
    for _ in range(2):
        adam.zero_grad()
        accelerator.backward(model(**models.batch(dist.get_rank())).loss)
        found.append(float(accelerator.clip_grad_norm_(model.parameters(), models.CLIP)))
        adam.step()
    far = models.apart(models.parameters(model), models.parameters(alone))
    return {
        "norms": max(abs(one - other) / other for one, other in zip(found, norms, strict=True)),
        "parameters": max(far.values()),
    }


def trained(path: Path, output: Path, resume: Path | None = None, rows: int = 2, **more: Any) -> Any:
    """Four steps of Trainer on eight rows each."""
    data = [{name: values[0] for name, values in models.batch(number).items()} for number in range(16)]
    arguments = transformers.TrainingArguments(
        str(output), max_steps=4, save_strategy="steps", save_steps=2, per_device_train_batch_size=rows,
        learning_rate=1e-2, max_grad_norm=0.1, use_cpu=True, report_to="none", disable_tqdm=True, **more,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def resumed_from_one_process(folder: Path) -> dict[str, Any]:
    """The last two steps again, from the checkpoint of a process without the setting."""
    path, output = models.saved(folder, "Qwen3Moe"), folder / "alone"
    models.set_choice(models.OURS)
    if dist.get_rank() == 0:
        call = f"trained(Path({str(path)!r}), Path({str(output)!r}), rows={2 * dist.get_world_size()}, weight_decay=0.1)"
        script = f"from pathlib import Path; from tests.parallel.experts.setting_cases import trained; {call}"
        outputs(started("-c", script, WORLD_SIZE="1", RANK="0", LOCAL_RANK="0"))
    dist.barrier()
    again = trained(path, folder / "again", output / "checkpoint-2", weight_decay=0.1)
    expected = models.parameters(models.whole(output / "checkpoint-4", "Qwen3Moe"))
    rates = [group["lr"] for group in again.optimizer.param_groups]
    far = models.apart(models.parameters(again.model), expected)
    saved = output / "checkpoint-2" / "optimizer.pt"

    def write(groups: slice) -> None:
        state = torch.load(saved)
        state["param_groups"] = state["param_groups"][groups]
        saved.unlink()  # ranks have mapped it
        torch.save(state, saved)

    refused = []
    for change in (lambda: write(slice(None, None, -1)), lambda: write(slice(1, None)), saved.unlink):
        if dist.get_rank() == 0:
            change()
        dist.barrier()
        refused.append(small.refusal(lambda: expert_checkpoints.load_optimizer(again, str(saved.parent))))
        dist.barrier()
    return {"far": max(far.values()), "rates": rates, "groups": len(rates), "refused": refused}


def trainer(folder: Path, checkpointing: bool) -> dict[str, Any]:
    """Four steps of Trainer; the last two again, from the checkpoint, in a model that is loaded anew."""
    path = models.saved(folder, "Qwen3Moe")
    models.set_choice(models.OURS)
    options = {"gradient_checkpointing": checkpointing}
    first = trained(path, folder / f"trainer{checkpointing}", **options)
    expected = models.parameters(first.model)
    saved = folder / f"trainer{checkpointing}" / "checkpoint-2"
    again = trained(path, folder / f"trainer{checkpointing}", saved, **options)
    far = models.apart(models.parameters(again.model), expected)
    alone = models.whole(folder / f"trainer{checkpointing}" / "checkpoint-4", "Qwen3Moe")
    whole = models.apart(models.parameters(alone), expected)
    # The higher loss counts as better, so the first checkpoint is the best.
    best = trained(
        path, folder / f"best{checkpointing}", load_best_model_at_end=True, greater_is_better=True,
        eval_strategy="steps", eval_steps=2, metric_for_best_model="loss", **options,
    )  # fmt: skip
    assert best.state.best_model_checkpoint.endswith("checkpoint-2")
    second = models.whole(folder / f"best{checkpointing}" / "checkpoint-2", "Qwen3Moe")
    kept = models.apart(models.parameters(best.model), models.parameters(second))
    return {"resumed": max(far.values()), "saved": max(whole.values()), "best": max(kept.values())}
