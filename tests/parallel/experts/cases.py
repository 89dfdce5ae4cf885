"""What one rank of a crew does: every function is a case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.experts import layers, models
from veomni_hook import bind, explain
from veomni_hook.parallel import expert_dispatch
from veomni_hook.routing import Routes, monitor, record, replay


def steps(
    folder: Path,
    family: str,
    ep: int,
    checkpointings: Sequence[str] = ("",),
    implementation: str = "veomni",
    experts: str | None = None,
) -> dict[str, dict[str, Any]]:
    """A forward and backward with each kind of checkpointing: how far loss and gradients are from one process's."""
    path, rank, found = models.saved(folder, family), dist.get_rank(), {}
    losses, expected = models.alone(path, family, dist.get_world_size(), experts)
    model = models.sharded(path, family, ep, implementation)
    bind(model, moe_experts=experts)
    for kind in checkpointings:
        if kind:
            model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        model.zero_grad()
        loss = model(**models.batch(rank)).loss
        loss.backward()
        far = models.apart(models.gradients(model), expected)
        worst = max(far, key=far.__getitem__)
        found[kind] = {
            "loss": abs(loss.item() - losses[rank]) / abs(losses[rank]),
            "worst": worst,
            "gradient": far[worst],
            "ran": sorted({row.backend for row in explain(model).rows if row.op == "moe_experts"}),
        }
    return found


def frozen(folder: Path, what: str, ep: int, checkpointing: str = "") -> dict[str, Any]:
    """A step in which some parameters are frozen: the gradients of the others."""
    path, rank, world = models.saved(folder, "Qwen3Moe"), dist.get_rank(), dist.get_world_size()

    def prepared(model: Any) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(what not in name)
        return model.train()

    alone = prepared(models.whole(path, "Qwen3Moe"))
    (sum(alone(**models.batch(number)).loss for number in range(world)) / world).backward()
    model = prepared(models.sharded(path, "Qwen3Moe", ep, "veomni"))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    model(**models.batch(rank)).loss.backward()
    found, expected = models.gradients(model), models.gradients(alone)
    assert not any(what in name for name in found)
    return {"far": max(models.apart(found, expected).values()), "gradients": len(found)}


Calls = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _empty(calls: Calls, *ranks: int) -> Calls:
    """The calls, without tokens on some ranks."""
    return [tuple(each[:0] for each in call) if rank in ranks else call for rank, call in enumerate(calls)]


def _duplicates(calls: Calls) -> Calls:
    for _, ids, _ in calls:
        ids[::2] = ids[::2, :1]
        ids[1::4, 1] = ids[1::4, 0]
    return calls


def _without_experts(calls: Calls) -> Calls:
    for _, ids, _ in calls:
        ids[::3, 0], ids[1::3, 1], ids[2] = -1, layers.EXPERTS, layers.EXPERTS + 5
    return calls


ROUTINGS = {
    "random": lambda calls: calls,
    "zero tokens on one rank": lambda calls: _empty(calls, len(calls) - 1),
    "zero tokens everywhere but on one rank": lambda calls: _empty(calls, *range(1, len(calls))),
    "all to one expert": lambda calls: [(x, torch.ones_like(ids), weights) for x, ids, weights in calls],
    "no tokens for one rank": lambda calls: [
        (x, ids % (layers.EXPERTS // len(calls)), weights) for x, ids, weights in calls
    ],
    "duplicate ids": _duplicates,
    "ids of no expert": _without_experts,
    "of other dtype": lambda calls: [(x, ids.int(), weights) for x, ids, weights in calls],
    "not contiguous": lambda calls: [tuple(each.t().contiguous().t() for each in call) for call in calls],
}


def layers_of(folder: Path, cases: Sequence[str], **options: Any) -> dict[str, dict[str, float]]:
    """`layer` for several kinds of routing."""
    return {case: layer(folder, case, **options) for case in cases}


def layer(folder: Path, case: str, k: int = 3, tokens: int = 20, **options: Any) -> dict[str, float]:
    """One experts module with routing of a kind: how far everything is from one process."""
    world = dist.get_world_size()
    calls = [layers.routed(tokens, k, rank) for rank in range(world)]
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    return layers.compare(ROUTINGS[case](calls), **options)


def recompute(
    folder: Path, perturbed: str, reentrant: bool, k: int = 3, dispatcher: str = "veomni"
) -> dict[str, Any]:
    """A checkpointed router and its experts, against their gradients without a checkpoint.

    In the recompute, logits have other ``noise``, or the experts of a token come in another ``order``.
    """
    from torch.utils.checkpoint import checkpoint as of_torch

    from veomni_hook.parallel.expert_records import checkpoint

    models.set_choice(models.OURS)
    experts = layers.whole()
    part = layers.own(experts)
    dispatch = layers.DISPATCHERS[dispatcher](part, *layers.meshes())
    rank = dist.get_rank()
    torch.manual_seed(rank)
    x = torch.randn(24, layers.HIDDEN)
    router = torch.nn.Linear(layers.HIDDEN, layers.EXPERTS, bias=False)
    noise = torch.randn(24, layers.EXPERTS) * 0.01
    passes, chosen = [0], []

    def block(x, call=dispatch):
        passes[0] += 1
        probabilities = router(x).softmax(-1)
        # As a kernel that rounds otherwise: near ties are decided in another way.
        again = passes[0] > 1
        off = noise if perturbed == "noise" and again else 0.0
        ids = (probabilities.detach() + off).topk(k).indices
        if perturbed == "order" and again:
            ids = ids.roll(1, dims=1)
        weights = probabilities.gather(1, ids)
        chosen.append(ids)
        return x + call(x, ids, weights)

    def gradients(function, states):
        router.zero_grad()
        part.zero_grad()
        states = states.clone().requires_grad_()
        function(states).square().sum().backward()
        return {"x": states.grad, "router": router.weight.grad.clone()} | {
            name: each.grad.clone() for name, each in part.named_parameters()
        }

    expected = gradients(block, x)
    passes[0], first = 0, len(chosen)
    call = checkpoint if dispatcher == "veomni" else of_torch
    exchanged = Exchanged()
    with exchanged:
        found = gradients(lambda states: call(block, states, use_reentrant=reentrant), x)
    assert passes[0] == 2
    drifted = int((chosen[first].sort().values != chosen[first + 1].sort().values).any(1).sum())
    far = models.apart(found, expected)
    of_experts = max(of for name, of in far.items() if name.startswith(("gate", "down")))
    return {
        "far": max(far.values()), "of_experts": of_experts, "drifted": drifted, "splits": exchanged.splits,
    }  # fmt: skip


def compiled(folder: Path) -> dict[str, float]:
    """A compiled block with a dispatch in the middle, against the same block as it is."""
    models.set_choice(models.OURS)
    part = layers.own(layers.whole())
    dispatch = layers.DISPATCHERS["veomni"](part, *layers.meshes())
    x, ids, weights = layers.routed(24, 3, dist.get_rank())

    def block(x, weights):
        return torch.tanh(dispatch(torch.sin(x), ids, weights)) * 2

    found = []
    for function in (block, torch.compile(block, backend="aot_eager")):
        part.zero_grad()
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        function(*leaves).square().sum().backward()
        of_experts = {name: each.grad.clone() for name, each in part.named_parameters()}
        found.append({"x": leaves[0].grad, "weights": leaves[1].grad} | of_experts)
    return models.apart(found[1], found[0])


class Exchanged(TorchDispatchMode):
    """The exchanges of a block: the splits, and the bytes that leave this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.splits: list[Any] = []
        self.sent = self.within = self.reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        world = dist.get_world_size()
        if name == "c10d::alltoall_base_":  # output, input, group, output splits, input splits
            sent = list(args[4]) or [args[1].shape[0] // world] * world
            self.splits.append([sent, list(args[3])])
            self._count(args[1], sent)
        elif name == "c10d::_allgather_base_":  # output, input
            self.splits.append(args[1].shape[0])
            self._count(args[1], [args[1].shape[0]] * world)
        elif name.startswith(
            ("_c10d_functional::all_to_all_single", "_c10d_functional_autograd::all_to_all_single")
        ):  # of transformers
            self._count(args[0], args[2])
        elif name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.reads += 1
        return function(*args, **kwargs or {})

    def _count(self, rows: torch.Tensor, splits: Any) -> None:
        each = rows.nbytes // max(rows.shape[0], 1)
        self.within += each * splits[dist.get_rank()]
        self.sent += each * (sum(splits) - splits[dist.get_rank()])


def traffic(
    folder: Path, dispatcher: str, k: int = 8, experts: int = 32, tokens: int = 256
) -> dict[str, Any]:
    """Bytes that leave this rank in a forward and backward, with balanced routing and rows as long as models'."""
    models.set_choice(models.OURS)
    width, world = 512, dist.get_world_size()
    sizes = {"num_experts": experts, "hidden_size": width}
    part = layers.own(layers.whole(**sizes), **sizes)
    dispatch = layers.DISPATCHERS[dispatcher](part, *layers.meshes())
    _, ids, weights = layers.routed(tokens, k, dist.get_rank(), experts)
    x = torch.randn(tokens, width, requires_grad=True)
    weights.requires_grad_()
    forward, backward = Exchanged(), Exchanged()
    with forward, mock.patch.object(expert_dispatch, "_on_host", wraps=expert_dispatch._on_host) as read:
        out = dispatch(x, ids, weights)
    with backward:
        out.sum().backward()
    assert world == 1 or forward.sent
    return {
        "forward": forward.sent, "backward": backward.sent, "reads": read.call_count + forward.reads + backward.reads,
    }  # fmt: skip


def replayed(folder: Path, ep: int, checkpointing: str) -> dict[str, Any]:
    """A step with given routes, this rank's experts being a part of the model's: how far from one process."""
    path, rank, world = models.saved(folder, "Qwen3Moe"), dist.get_rank(), dist.get_world_size()
    shift = torch.arange(24)[:, None]

    def given(model: Any, number: int) -> Routes:
        with record(model) as chosen, torch.no_grad():
            model(**models.batch(number))
        return Routes({name: (chosen[name].long() + 1 + shift) % 8 for name in chosen.calls}, 8)

    alone = models.whole(path, "Qwen3Moe")
    routes = [given(alone, number) for number in range(world)]
    losses = []
    for number in range(world):
        with replay(alone, routes[number]):
            losses.append(alone(**models.batch(number)).loss)
    (sum(losses) / world).backward()
    expected = models.gradients(alone)
    model = models.sharded(path, "Qwen3Moe", ep, "veomni")
    model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    with replay(model, routes[rank]), monitor(model) as load:
        loss = model(**models.batch(rank)).loss
    loss.backward()
    far = models.apart(models.gradients(model), expected)
    load.reduce()
    return {
        "loss": abs(loss.item() - losses[rank].item()) / abs(losses[rank].item()),
        "gradient": max(far.values()),
        "tokens": [int(each) for each in load.tokens.values()],
    }
