"""Trainer's checkpoints of models whose experts this package divided: saved and resumed, on any mesh.

transformers' Trainer refuses to save optimizers of models that are sharded when they are loaded, because it
cannot resume them; older releases know nothing of such models. For the models of
`veomni_hook.parallel.expert_loading`, the patched `transformers.trainer` asks here instead. A checkpoint is
what a single process saves, so one process resumes it, too, without this package.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from veomni_hook.errors import ParallelError
from veomni_hook.parallel import expert_saving
from veomni_hook.parallel.expert_adapters import has_adapters
from veomni_hook.parallel.expert_plans import is_ours
from veomni_hook.parallel.gradient_norm import by_mesh

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = [
    "groups",
    "load_best",
    "load_model",
    "load_optimizer",
    "resumes",
    "save_model",
    "save_optimizer",
    "saves",
]

#: Upstream's files.
_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"
#: How names begin of what FSDP saves.
_FSDP = "pytorch_model_fsdp"
#: What a schedule's state has a value of for each group.
_OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")
#: What a trainer keeps: the groups that its optimizer has in one process.
_GROUPS = "_veomni_groups"


def resumes(trainer: Trainer) -> bool:
    """Whether checkpoints of a trainer's model can be saved and resumed here."""
    return is_ours(getattr(trainer, "model", None))


def groups(trainer: Trainer, parameters: Any) -> Any:
    """Return an optimizer's groups so that each has parameters of one mesh: fused kernels take no others.

    A group without parameters stays: one process has it, too.
    """
    if not resumes(trainer) or not isinstance(parameters, list):
        return parameters
    setattr(trainer, _GROUPS, [[*group["params"]] for group in parameters])
    return [
        {**group, "params": own}
        for group in parameters
        for own in (by_mesh(group["params"]).values() or [group["params"]])
    ]


def _optimizer(trainer: Trainer) -> tuple[torch.optim.Optimizer, expert_saving.Groups]:
    """Return the optimizer that accelerate has wrapped, and the groups that it has in one process."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    own = [group["params"] for group in optimizer.param_groups]  # of a script's own optimizer
    return optimizer, getattr(trainer, _GROUPS, own)


def saves(trainer: Trainer) -> bool:
    """Whether a process takes part in saving a trainer's model."""
    return trainer.args.should_save or resumes(trainer)


def save_model(trainer: Trainer, folder: str) -> None:
    """Save the weights of a trainer's model into ``folder``. All ranks of a model of ours must call."""
    state = expert_saving.whole_state(trainer.model) if resumes(trainer) else None
    if state is None or distributed.get_rank() == 0:
        trainer._save(folder, state_dict=state)


def save_optimizer(trainer: Trainer, folder: str) -> None:
    """Save the optimizer's and the scheduler's state into ``folder``. All ranks must call."""
    if not resumes(trainer):
        trainer._save_optimizer_and_scheduler(folder)
        return
    optimizer, groups = _optimizer(trainer)
    expert_saving.save_whole_optimizer(optimizer, groups, os.path.join(folder, _OPTIMIZER))
    if distributed.get_rank() == 0:
        state, first = trainer.lr_scheduler.state_dict(), 0
        firsts = []
        for parts, _ in expert_saving.arranged(optimizer, optimizer.state_dict(), groups):
            firsts.append(first)
            first += len(parts)
        state |= {name: [state[name][place] for place in firsts] for name in _OF_GROUPS if name in state}
        torch.save(state, os.path.join(folder, _SCHEDULER))
    distributed.barrier()


def load_optimizer(trainer: Trainer, folder: str | None) -> None:
    """Load what `save_optimizer` or a single process saved. All ranks must call.

    Raises:
        ParallelError: the optimizer was saved in another form.
    """
    if not resumes(trainer) or folder is None:
        trainer._load_optimizer_and_scheduler(folder)
        return
    whole, scheduler = (os.path.join(folder, name) for name in (_OPTIMIZER, _SCHEDULER))
    if not os.path.isfile(scheduler):
        return  # as upstream: weights alone were saved
    if not os.path.isfile(whole):
        raise ParallelError(
            f"{folder} has the schedule of an optimizer, but not its states as {_OPTIMIZER}",
            where="Trainer.train",
            fix="resume where it was saved, or leave only the weights there to train on from them",
        )
    optimizer, groups = _optimizer(trainer)
    state = torch.load(whole, map_location="cpu", weights_only=True, mmap=True)
    expert_saving.load_whole_optimizer(optimizer, groups, state)
    state = torch.load(scheduler, weights_only=True)
    counts = [len(parts) for parts, _ in expert_saving.arranged(optimizer, optimizer.state_dict(), groups)]
    state |= {
        name: [value for value, count in zip(state[name], counts, strict=True) for _ in range(count)]
        for name in _OF_GROUPS
        if name in state
    }
    trainer.lr_scheduler.load_state_dict(state)


@torch.no_grad()
def load_model(trainer: Trainer, folder: str) -> None:
    """Load the weights of a checkpoint into the trainer's model. All ranks must call.

    They go through `from_pretrained`, which knows how a family's checkpoint names and stacks its tensors.
    Until they are copied, a rank has its part twice.

    Raises:
        ParallelError: FSDP has saved them in its own form.
    """
    if not resumes(trainer) or has_adapters(trainer.model):  # each rank has a whole adapter
        trainer._load_from_checkpoint(folder)
        return
    if any(name.startswith(_FSDP) for name in os.listdir(folder)):
        raise ParallelError(
            f"{folder} was saved by FSDP in its own form ({_FSDP}), which ep does not read",
            where="Trainer.train",
            fix="resume it with the FSDP settings that saved it, or make weights of it (`accelerate "
            "merge-weights`) and train on from them",
        )
    model = trainer.model
    config = getattr(model.config, "distributed_config", None)
    loaded = type(model).from_pretrained(folder, distributed_config=config, dtype=model.dtype)
    ours, theirs = dict(model.named_parameters()), dict(loaded.named_parameters())
    ours |= dict(model.named_buffers())
    theirs |= dict(loaded.named_buffers())
    for name, tensor in ours.items():
        _local(tensor).copy_(_local(theirs[name]))


def load_best(trainer: Trainer) -> None:
    """Load the weights of the best checkpoint of this training. All ranks must call."""
    if resumes(trainer) and not has_adapters(trainer.model):
        load_model(trainer, trainer.state.best_model_checkpoint)
    else:
        trainer._load_best_model()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
