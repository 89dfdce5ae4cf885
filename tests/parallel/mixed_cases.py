"""Mixed precision and frozen parts where two processes share sequences, against one process that computes alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.parallel import small
from tests.parallel.mutants import change
from tests.parallel.test_mutants import GATHER
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.parallel import process

Tensors = dict[str, torch.Tensor]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FROZEN: dict[str, Callable[[str], bool]] = {
    "embeddings": lambda name: "embed_tokens" in name,
    "lower layer": lambda name: "embed_tokens" in name or "layers.0." in name,
    "all but the head": lambda name: "lm_head" not in name,
    "all but adapters": lambda name: "q_proj" not in name,
}


def sharded(model: Any, sizes: str, policy: MixedPrecisionPolicy) -> Any:
    """Return a model whose parameters all processes hold together, or each of them by itself."""
    mesh = init_device_mesh(
        "cpu", (2,) if sizes else (2, 1), mesh_dim_names=("all",) if sizes else ("rest", "all")
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["all"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["all"], mp_policy=policy)


def full(tensors: dict[str, Any]) -> Tensors:
    return {
        name.removeprefix("module."): (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        .detach()
        .clone()
        for name, tensor in tensors.items()
        if tensor is not None
    }


def fsdp2(sizes: str, dtype: torch.dtype) -> Tensors:
    """Gradients with parameters in bfloat16 and their reduction in float32."""
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else HALF
    model = sharded(small.model("llama"), sizes, policy)
    model(**small.batch("padded", 15)).loss.backward()
    return full({name: parameter.grad for name, parameter in model.named_parameters()})


def autocast(sizes: str, dtype: torch.dtype) -> Tensors:
    """Gradients under autocast."""
    model = small.model("qwen3")
    context = contextlib.nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype)
    with context:
        loss = model(**small.batch("padded", 15)).loss
    loss.backward()
    return small.gradients(model, sizes)


def scaled(sizes: str, dtype: torch.dtype) -> Tensors:
    """The change of parameters in some steps with a gradient scaler, whose scale is too large in the first."""
    model = small.model("llama")
    before = full(dict(model.named_parameters()))
    trained = DistributedDataParallel(model) if sizes else model
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=dtype != torch.float32)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    while len(steps) < 3:
        sgd.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = trained(**small.batch("padded", 12 + len(steps))).loss
        scaler.scale(loss).backward()
        scaler.unscale_(sgd)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scale = scaler.get_scale()
        scaler.step(sgd)
        scaler.update()
        if scaler.get_scale() >= scale:
            steps.append(scale)
    scales = {"scale": torch.tensor(steps)} if dtype != torch.float32 else {}
    return scales | {
        name: after - before[name] for name, after in full(dict(model.named_parameters())).items()
    }


#: The sum over processes that share the rows of a loss.
SHARES = ("parallel.loss:_Rows.all_averaged", "return all_averaged(x, self.group)", "return x")
CASES = {
    "fsdp2": (fsdp2, torch.bfloat16),
    "autocast": (autocast, torch.bfloat16),
    "scaled": (scaled, torch.float16),
}


def frozen(sizes: str, parts: str) -> Tensors:
    """Gradients where parts are frozen."""
    model = small.model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[parts](name))
    model = sharded(model, sizes, MixedPrecisionPolicy())
    loss = model(**small.batch("padded", 15)).loss
    loss.backward()
    return full({"loss": loss} | {name: parameter.grad for name, parameter in model.named_parameters()})


def told(case: Callable[..., Tensors], sizes: str, *arguments: Any) -> Tensors:
    process.tell(sizes)
    return case(sizes, *arguments)


def distance(found: Tensors, expected: Tensors) -> dict[str, float]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {name: float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items()}


def mixed(kind: str) -> dict[str, Any]:
    """Return how far one process and two are from float32, before and after a gather loses half of its gradient."""
    case, dtype = CASES[kind]
    exact, one, two = (
        told(case, *arguments) for arguments in (("", torch.float32), ("", dtype), ("sp=2", dtype))
    )
    change(*GATHER)
    broken = told(case, "sp=2", dtype)
    scales = [[*map(float, found.pop("scale", ()))] for found in (one, two, broken)]
    return {
        "one": distance(one, exact),
        "two": distance(two, exact),
        "broken": distance(broken, exact),
        "scales": scales[:2],
        "reduced": {name: bool((grad != grad.bfloat16()).any()) for name, grad in two.items()},
    }


def parts(parts: str) -> dict[str, Any]:
    """Return how far gradients of what is not frozen are from those of one process, and when they lose a sum."""
    set_choice("torch")
    one, two = (told(frozen, sizes, parts) for sizes in ("", "sp=2"))
    change(*(SHARES if parts == "all but the head" else GATHER))
    return {
        "far": small.worst(two, one)[0],
        "broken": small.worst(told(frozen, "sp=2", parts), one)[0],
        "frozen": sum(map(FROZEN[parts], dict(small.model("llama").named_parameters()))),
    }
