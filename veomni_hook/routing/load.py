"""`monitor`: count the tokens of each expert, and how undecided routers are."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed, nn

from veomni_hook.kernels.moe_router.variants import LAYOUTS
from veomni_hook.routing.plot import heat_map
from veomni_hook.routing.session import Routed, Session, opened

__all__ = ["Layer", "Load", "monitor"]


class Layer(NamedTuple):
    """The summary of one router, as numbers.

    Attributes:
        tokens: how many tokens it has routed.
        most: tokens of the busiest expert, in multiples of the mean.
        idle: how many experts got no token.
        entropy: the mean over tokens of the entropy of the router's probabilities, in nats; None if not
            counted.
    """

    tokens: int
    most: float
    idle: int
    entropy: float | None


@dataclass(eq=False, repr=False)
class Load:
    """What `monitor` has counted, by the name of the router. Tensors are on the device of the model.

    Attributes:
        counts: ``[experts]``, int64: how many tokens each expert got. A token counts for each of its experts.
        entropies: float64 without dimensions: the sum over tokens of the entropy of the router's
            probabilities, in nats. These are the softmax of the logits, or the scores divided by their sum.
            Empty if not counted.
        tokens: int64 without dimensions: how many tokens the router has routed.
    """

    counts: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    entropies: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    tokens: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        return f"Load({len(self.counts)} routers)"

    def reset(self) -> None:
        """Forget everything counted so far."""
        for counted in (self.counts, self.entropies, self.tokens):
            counted.clear()

    def entropy(self) -> dict[str, torch.Tensor]:
        """Return the mean entropy over tokens, in nats; it waits for no device."""
        return {name: total / self.tokens[name] for name, total in self.entropies.items()}

    def idle(self) -> dict[str, torch.Tensor]:
        """Return how many experts of each router got no token; it waits for no device."""
        return {name: (tokens == 0).sum() for name, tokens in self.counts.items()}

    def most(self) -> dict[str, torch.Tensor]:
        """Return the tokens of the busiest expert in multiples of the mean; it waits for no device."""
        return {name: tokens.max() / tokens.double().mean() for name, tokens in self.counts.items()}

    def reduce(self, group: object = None) -> None:
        """Add up what the processes of ``group`` (None: all) have counted, in each of them.

        Every process of the group has to call it, with the same routers. Processes that share sequences count
        their own positions, those that share experts their own tokens, so the sum counts every token once.
        """
        for counted in (self.counts, self.entropies, self.tokens):
            for name in sorted(counted):
                distributed.all_reduce(counted[name], group=group)

    def summary(self) -> dict[str, Layer]:
        """Return numbers for each router; it waits for the device once."""
        if not self.counts:
            return {}
        entropy = self.entropy()
        none = torch.full((), float("nan"), dtype=torch.float64)
        rows = [
            torch.stack([
                self.tokens[name].double(),
                self.most()[name],
                self.idle()[name].double(),
                entropy.get(name, none.to(tokens.device)),
            ])
            for name, tokens in self.counts.items()
        ]  # fmt: skip
        numbers = torch.stack(rows).tolist()
        return {
            name: Layer(int(tokens), most, int(idle), value if name in entropy else None)
            for name, (tokens, most, idle, value) in zip(self.counts, numbers, strict=True)
        }

    def plot(self, path: str | Path, *, title: str = "Tokens of each expert") -> None:
        """Write a picture (SVG) with a row for each router and a column for each expert.

        The colour is the number of tokens in multiples of the row's mean; experts without a token are marked.
        It waits for the device.
        """
        rows = {name: tokens.tolist() for name, tokens in self.counts.items()}
        Path(path).write_text(heat_map(rows, title), encoding="utf-8")


class _Monitor(Session):
    def __init__(self, model: nn.Module, leave: Collection[str], *, entropy: bool) -> None:
        super().__init__(model, leave, "routing.monitor")
        self.load = Load()
        self.entropy = entropy

    @torch.no_grad()
    def see(self, routed: Routed) -> None:
        """Count one call."""
        load, name, logits = self.load, routed.name, routed.logits
        chosen, experts = routed.indices.flatten(0, -2), logits.shape[-1]
        if routed.split is not None:
            chosen = routed.split.once(chosen)
        if name not in load.counts:
            load.counts[name] = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
            load.tokens[name] = torch.zeros((), dtype=torch.int64, device=chosen.device)
        load.counts[name] += _counted(chosen.flatten(), experts)
        load.tokens[name] += chosen.shape[0]
        if self.entropy:
            entropies = torch.special.entr(_probabilities(routed)).sum(-1, keepdim=True).flatten(0, -2)
            entropies = entropies if routed.split is None else routed.split.once(entropies)
            total = entropies.sum(dtype=torch.float64)
            load.entropies[name] = load.entropies[name] + total if name in load.entropies else total

    def check(self) -> None:
        """Raise RoutingError if a router did not ask; a block without a forward pass is fine."""
        if self.called:
            super().check()


def _counted(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert is in ``chosen``; not by ``bincount``, which waits for the device."""
    if chosen.is_cuda:
        # It counts in shared memory, where the adds of `scatter_add_` meet in a few numbers: with these, a
        # monitored layer took 0.27 ms more on an H200 (16,384 tokens, 8 of 128 experts).
        return torch.histc(chosen.int(), experts, min=0, max=experts)
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def _probabilities(routed: Routed) -> torch.Tensor:
    """The router's probabilities ``[..., experts]``, float32."""
    if routed.variant in ("softmax_topk", "topk_softmax"):
        return torch.softmax(routed.logits, -1, dtype=torch.float32)
    layout = LAYOUTS.get(routed.variant)
    score = routed.operand("score") if layout is None or layout.any_score else torch.sigmoid
    scores = score(routed.logits).float()
    return scores / scores.sum(-1, keepdim=True)


@contextmanager
def monitor(model: nn.Module, *, entropy: bool = True, leave: Collection[str] = ()) -> Iterator[Load]:
    """Count, in the forward passes of the block, the tokens that the routers of ``model`` send to each
    expert.

    Counting changes no bit of what the model computes, and waits for no device. Calls that a checkpoint
    repeats in a backward pass are not counted again. All tokens count, padding included.

    Args:
        model: a model, or a wrapper of one, with recognised routers.
        entropy: add up the entropy of each router's probabilities as well.
        leave: patterns (as of `fnmatch`) of names of routers, or of blocks of experts, that are not counted.

    Yields:
        The counts; read them in the block or behind it.

    Raises:
        RoutingError: a router is not recognised, or, at the end of the block, did not pass its calls on.
        KernelError: the model is not patched.
    """
    session = _Monitor(model, leave, entropy=entropy)
    with opened(session):
        yield session.load
