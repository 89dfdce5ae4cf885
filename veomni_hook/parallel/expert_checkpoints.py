"""Trainer's checkpoints of models whose experts this package divided: saved and resumed, on any mesh.

transformers' Trainer refuses to save optimizers of models that are sharded when they are loaded, because it
cannot resume them; older releases know nothing of such models. For the models of
`veomni_hook.parallel.expert_loading`, the patched `transformers.trainer` asks here instead. Weights are
saved as a single process saves them, optimizers by `expert_saving`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from veomni_hook.errors import ParallelError
from veomni_hook.parallel import expert_saving
from veomni_hook.parallel.expert_loading import is_ours
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

#: Of this package; of upstream, in one process and beside it.
_FOLDER, _WHOLE, _SCHEDULER = "optimizer", "optimizer.pt", "scheduler.pt"


def resumes(trainer: Trainer) -> bool:
    """Whether checkpoints of a trainer's model can be saved and resumed here."""
    return is_ours(getattr(trainer, "model", None))


def groups(trainer: Trainer, parameters: Any) -> Any:
    """Return an optimizer's groups so that each has parameters of one mesh: fused kernels take no others."""
    if not resumes(trainer):
        return parameters
    return [{**group, "params": own} for group in parameters for own in by_mesh(group["params"]).values()]


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
    expert_saving.save_optimizer(trainer.model, _plain(trainer.optimizer), os.path.join(folder, _FOLDER))
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), os.path.join(folder, _SCHEDULER))
    distributed.barrier()


def load_optimizer(trainer: Trainer, folder: str | None) -> None:
    """Load what `save_optimizer` or a process with the whole model saved. All ranks must call.

    Raises:
        ParallelError: the optimizer was saved in another form.
    """
    if not resumes(trainer) or folder is None:
        trainer._load_optimizer_and_scheduler(folder)
        return
    divided, whole, scheduler = (os.path.join(folder, name) for name in (_FOLDER, _WHOLE, _SCHEDULER))
    optimizer = _plain(trainer.optimizer)
    if os.path.isdir(divided):
        expert_saving.load_optimizer(trainer.model, optimizer, divided)
    elif os.path.isfile(whole):
        state = torch.load(whole, map_location="cpu", weights_only=True, mmap=True)
        expert_saving.load_whole_optimizer(trainer.model, optimizer, state)
    elif os.path.isfile(scheduler):
        raise ParallelError(
            f"{folder} has the schedule of an optimizer, but not its states as {_FOLDER} or {_WHOLE}",
            where="Trainer.train",
            fix="resume where it was saved, or leave only the weights there to train on from them",
        )
    else:
        return  # as upstream: weights alone were saved
    state = torch.load(scheduler, weights_only=True)
    # A group that is divided by meshes has a rate in the schedule for each part.
    own = trainer.lr_scheduler.state_dict()
    for name, key in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if name in own:
            state[name] = [group[key] for group in optimizer.param_groups]
    if len(state.get("lr_lambdas", ())) != len(own.get("lr_lambdas", ())):
        state["lr_lambdas"] = own["lr_lambdas"]
    trainer.lr_scheduler.load_state_dict(state)


@torch.no_grad()
def load_model(trainer: Trainer, folder: str) -> None:
    """Load the weights of a checkpoint into the trainer's model. All ranks must call.

    They go through `from_pretrained`, which knows how a family's checkpoint names and stacks its tensors.
    Until they are copied, a rank has its part twice.
    """
    if not resumes(trainer):
        trainer._load_from_checkpoint(folder)
        return
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
    if resumes(trainer):
        load_model(trainer, trainer.state.best_model_checkpoint)
    else:
        trainer._load_best_model()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate has wrapped."""
    plain: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return plain
