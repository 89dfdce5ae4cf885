"""Cases of several steps: clipping, optimizers, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.parallel.experts import models
from veomni_hook.kernels.shared.sharded import _modules_of_units
from veomni_hook.parallel import clip_grad_norm_, load_optimizer, save_optimizer


def _one_process(path: Path, family: str, number: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = models.whole(path, family)
    batches = [models.batch(rank) for rank in range(dist.get_world_size())]
    norms, _ = models.steps(model, batches, torch.nn.utils.clip_grad_norm_, number)
    return norms, models.parameters(model)


def train(folder: Path, family: str, ep: int) -> dict[str, Any]:
    """Five steps of AdamW with clipped gradients against one process."""
    path = models.saved(folder, family)
    norms, expected = _one_process(path, family, 5)
    model = models.sharded(path, family, ep, "veomni")
    found, _ = models.steps(model, [models.batch(dist.get_rank())], clip_grad_norm_, 5)
    far = models.apart(models.parameters(model), expected)
    return {
        "norms": max(abs(one - other) / other for one, other in zip(found, norms, strict=True)),
        "parameters": max(far.values()),
        "clipped": max(norms) > models.CLIP,
    }


def _in_units() -> list[str]:
    """The classes of experts whose weights units of FSDP2 hold."""
    held = {type(module).__name__.removeprefix("FSDP") for module in _modules_of_units()}
    assert any(name.endswith("Norm") for name in held)
    return sorted(name for name in held if name.endswith("Experts"))


def accumulate(folder: Path, family: str, ep: int, checkpointing: bool) -> dict[str, Any]:
    """Three steps over two batches a rank, of which the second alone synchronises, against one process."""
    path, rank, world = models.saved(folder, family), dist.get_rank(), dist.get_world_size()
    alone, model = models.whole(path, family), models.sharded(path, family, ep, "veomni")
    if checkpointing:
        model.gradient_checkpointing_enable()
    numbers = [rank, rank + world]
    adams = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (alone, model)]
    norms, far = [], []
    for _ in range(3):
        for adam in adams:
            adam.zero_grad()
        with models.told(""):
            (sum(alone(**models.batch(number)).loss for number in range(2 * world)) / (2 * world)).backward()
        for number in numbers:
            model.set_requires_gradient_sync(number == numbers[-1])
            (model(**models.batch(number)).loss / 2).backward()
        far.append(max(models.apart(models.gradients(model), models.gradients(alone)).values()))
        one = torch.nn.utils.clip_grad_norm_(alone.parameters(), models.CLIP)
        norms.append(abs(float(clip_grad_norm_(model.parameters(), models.CLIP) / one) - 1))
        for adam in adams:
            adam.step()
    weights = [each for name, each in model.named_parameters() if ".experts." in name]
    return {
        "gradients": max(far),
        "norms": max(norms),
        "parameters": max(models.apart(models.parameters(model), models.parameters(alone)).values()),
        "in units": _in_units(),
        "meshes": sorted({each.device_mesh.mesh_dim_names for each in weights}),
    }


def units(
    folder: Path, ep: int, experts: int = 8, implementation: str = "veomni", mixed: bool = False
) -> Any:
    """The experts in units of FSDP2, and how far a step's gradients are from those of one process."""
    path, world = folder / f"{experts} experts", dist.get_world_size()
    if dist.get_rank() == 0:
        models.small("Qwen3Moe", num_experts=experts).save_pretrained(path)
    dist.barrier()
    _, expected = models.alone(path, "Qwen3Moe", world)
    if implementation != "veomni":
        models.sharded(path, "Qwen3Moe", ep, "veomni")  # leaves transformers' own dispatch alone
    options = {"fsdp_mixed_precision": True} if mixed else {}
    model = models.sharded(path, "Qwen3Moe", ep, implementation, **options)
    model(**models.batch(dist.get_rank())).loss.backward()
    far = models.apart(models.gradients(model), expected)
    return {"in units": _in_units(), "gradients": max(far.values())}


def clip(folder: Path, ep: int, kind: str) -> dict[str, Any]:
    """The norm of gradients of which one rank's share has a number that is not finite, or of other norms."""
    path = models.saved(folder, "Qwen3Moe")
    model = models.sharded(path, "Qwen3Moe", ep, "veomni")
    model(**models.batch(dist.get_rank())).loss.backward()
    whole = models.gradients(model)
    meshes = {str(each.grad.device_mesh) for each in model.parameters()}
    if kind == "nan":
        grad = next(each.grad for name, each in model.named_parameters() if name.endswith("gate_up_proj"))
        if dist.get_rank() == 0:
            grad.to_local().view(-1)[0] = float("nan")
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        try:
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            raised = False
        except RuntimeError:
            raised = True
        return {"finite": bool(norm.isfinite()), "raised": raised, "meshes": len(meshes)}
    power = float(kind)
    stacked = torch.stack([torch.linalg.vector_norm(each, power) for each in whole.values()])
    expected = torch.linalg.vector_norm(stacked, power)
    norm = clip_grad_norm_(model.parameters(), 0.01, power)
    scaled = [each.grad.full_tensor() for each in model.parameters() if isinstance(each.grad, DTensor)]
    after = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(each, power) for each in scaled]), power
    )
    return {"far": abs(float(norm / expected) - 1), "after": float(after), "meshes": len(meshes)}


def checkpoint(folder: Path, ep: int, other: int, distributed: bool) -> dict[str, Any]:
    """Save on one mesh, load on another, and in one process that knows nothing of the dispatch."""
    path, target = models.saved(folder, "Qwen3Moe"), folder / f"saved{ep}{other}{distributed}"
    model = models.sharded(path, "Qwen3Moe", ep, "veomni")
    models.steps(model, [models.batch(dist.get_rank())], clip_grad_norm_, 2)
    expected = models.parameters(model)
    model.save_pretrained(target, **({"distributed_checkpoint": True} if distributed else {}))
    if distributed and dist.get_rank() == 0:
        model.config.save_pretrained(target)
    dist.barrier()
    again = models.parameters(models.sharded(target, "Qwen3Moe", other, "veomni"))
    result = {"other mesh": max(models.apart(again, expected).values())}
    if distributed:
        from transformers.distributed.checkpoint import consolidate_distributed_checkpoint

        if dist.get_rank() == 0:
            consolidate_distributed_checkpoint(target, target / "whole")
            model.config.save_pretrained(target / "whole")
        dist.barrier()
        target = target / "whole"
    alone = models.whole(target, "Qwen3Moe")
    assert alone.config.num_experts == models.FAMILIES["Qwen3Moe"]["num_experts"]
    return result | {"one process": max(models.apart(models.parameters(alone), expected).values())}


def optimizer(folder: Path, ep: int, other: int) -> dict[str, Any]:
    """Three steps, saved with the optimizer; two more on another mesh: five steps of one process."""
    path, target = models.saved(folder, "Qwen3Moe"), folder / f"resumed{ep}{other}"
    _, expected = _one_process(path, "Qwen3Moe", 5)
    batches = [models.batch(dist.get_rank())]
    model = models.sharded(path, "Qwen3Moe", ep, "veomni")
    _, adam = models.steps(model, batches, clip_grad_norm_, 3)
    model.save_pretrained(target)
    save_optimizer(model, adam, target / "optimizer")
    dist.barrier()
    model = models.sharded(target, "Qwen3Moe", other, "veomni")
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    load_optimizer(model, adam, target / "optimizer")
    models.steps(model, batches, clip_grad_norm_, 2, adam)
    return {"far": max(models.apart(models.parameters(model), expected).values())}
