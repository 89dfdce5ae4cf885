"""Tokens to the ranks that hold their experts, and back: each token once for each rank.

transformers' ``all_to_all`` sends one row for each pair of a token and one of its experts. Here a token that
goes to several experts of one rank is sent there once, with their numbers and weights. The experts' rank
forms the weighted sum of its experts, and one row comes back. With eight of 128 experts on two ranks that is
a quarter of the rows.

Forward:   ids and weights [S, k] and rows [S, H] out, sums [S, H] back; S counts pairs of a token and a rank.
Backward:  the gradient of the sums out, the gradients of rows and weights back.
Recompute: rows out, sums back.
Host:      one read, of the numbers of rows and pairs; none in backward, none when a checkpoint is recomputed.
Saved:     the received rows and weights, and four tables of numbers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_to_all_single_autograd,
    wait_tensor,
)

from veomni_hook.kernels.moe_experts.torch_routing import assigned
from veomni_hook.kernels.shared.host_values import note_derived
from veomni_hook.parallel.expert_copies import Copies, Saved, collect, copies_of, spread
from veomni_hook.parallel.expert_records import current, record_checkpoints
from veomni_hook.parallel.expert_units import announce, with_scaled_gradient
from veomni_hook.patches.expert_release import NAME, dispatches

__all__ = ["OncePerRank", "register"]

#: Received pairs get a row each from so many places for each pair on. A place costs experts memory (their
#: first product), a row of its own costs a copy of the token.
_SPARSE = 2.5
#: Values of ``experts_implementation`` that skip places marked with the number of local experts. Not all of
#: upstream's loops do, and these also run where a kernel refuses. In releases that do not let this package
#: dispatch, marks need weights of 0, are written over, or give biases gradients that are not finite.
_SKIP_MARKS = ("batched_mm", "grouped_mm") if dispatches() else ()


class Routing(NamedTuple):
    """What one call dispatched; all that a recompute needs.

    Attributes:
        ids: ``[T, k]``: the experts of this rank's tokens.
        weights: ``[M, k]``: the weights of the received rows, without gradient.
        copies: from tokens to sent rows.
        sent: rows for each rank.
        received: rows from each rank.
        local: what this rank's experts are asked for.
    """

    ids: Tensor
    weights: Tensor
    copies: Copies
    sent: list[int]
    received: list[int]
    local: Local


class Local(NamedTuple):
    """The calls of one rank's experts.

    Attributes:
        ids: ``[M, k]``: experts of the received rows; the number of local experts marks a place that is
            for another rank; or ``[P, 1]`` if every pair of a row and an expert has a row of its own.
        pairs: from received rows to rows of pairs; None: places are marked.
        places: ``[P]``: the positions of pairs in the flattened ``[M, k]``; None: places are marked.
    """

    ids: Tensor
    pairs: Copies | None = None
    places: Tensor | None = None


class OncePerRank:
    """The dispatch of one experts module, made as transformers makes an `EPImplementation`.

    Ids without an expert, negative ones or those from the number of experts on, add nothing. Experts run as
    they would without dispatch: in this package's kernels or in transformers' ``experts_implementation``.

    Args:
        experts: has its part of the weights, and their number as ``num_experts``; its forward is called.
        ep_mesh: the ranks that share the experts.
        tp_mesh: the ranks that share a batch; None: nobody does.

    Raises:
        ValueError: tensor parallelism, where ranks share a batch.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any = None) -> None:
        if tp_mesh is not None and tp_mesh.size() > 1:
            raise ValueError(
                f"ep_implementation={NAME!r} does not support tensor parallelism (tp_size={tp_mesh.size()}); "
                "use ep_implementation='all_to_all', or tp_size=1"
            )
        self.experts_forward = experts.forward
        self.num_local_experts: int = experts.num_experts
        self.config = getattr(experts, "config", None)
        self.ep_mesh = ep_mesh
        self.group = ep_mesh.get_group()
        #: By what gradients of the experts' weights are divided here; 1: FSDP2 divides them, or nobody does.
        self.divisor = 1
        self._bounds: Tensor | None = None
        record_checkpoints()
        announce(experts, self)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums ``[T, H]`` for this rank's tokens. All ranks of the group must call."""
        # Divided below, for the experts' weights alone.
        hidden_states = with_scaled_gradient(hidden_states, self.divisor)
        top_k_weights = with_scaled_gradient(top_k_weights, self.divisor)
        record = current()
        make = partial(self._route, top_k_index, top_k_weights)
        routing: Routing = make() if record is None else record.take(self, make)
        if record is not None:
            # In the first pass as well: both passes must save the same tensors.
            top_k_weights = in_recorded_order(routing.ids, top_k_index, top_k_weights)
        sent, received = routing.sent, routing.received
        rows = self._exchange(spread(hidden_states, routing.copies), sent, received)
        weights = _Delivered.apply(top_k_weights, routing, self.group, *routing.copies)  # type: ignore[no-untyped-call]
        summed = self._sums(rows, weights, routing.local).to(hidden_states.dtype)
        sums = collect(self._exchange(summed, received, sent), routing.copies)
        return with_scaled_gradient(sums, 1 / self.divisor)

    @torch.no_grad()
    def _route(self, top_k_index: Tensor, top_k_weights: Tensor) -> Routing:
        ids = top_k_index.to(torch.int32)
        if self._bounds is None or self._bounds.device != ids.device:
            ends = torch.arange(self.ep_mesh.size() + 1, dtype=torch.int32, device=ids.device)
            self._bounds = ends * self.num_local_experts
        # Rank r has number r + 1; ids of no expert are below the first or from the last bound on.
        owner = torch.bucketize(ids, self._bounds, right=True)
        pairs = ids.new_zeros(ids.shape[0], self.ep_mesh.size() + 2)
        pairs = pairs.scatter_add_(1, owner, torch.ones_like(ids))[:, 1:-1]
        wanted = pairs > 0
        counts = torch.stack([wanted.sum(0), pairs.sum(0)], dim=1)
        expected = torch.empty_like(counts)
        exchange: Any = dist.all_to_all_single(expected, counts, group=self.group, async_op=True)
        copies = copies_of(wanted, by_place=True)  # while counts travel, and before the host waits for them
        exchange.wait()
        outgoing, incoming = _on_host(torch.stack([counts, expected]))
        sent, received = [rows for rows, _ in outgoing], [rows for rows, _ in incoming]
        copies = copies.first(sum(sent))
        weights, asked = self._post(top_k_weights, ids, copies, sent, received)
        local = self._local(asked, sum(of_rank for _, of_rank in incoming))
        return Routing(ids, weights, copies, sent, received, local)

    def _post(
        self, weights: Tensor, ids: Tensor, copies: Copies, sent: list[int], received: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Send weights and ids with every row, in one message; return those that arrive."""
        both = torch.cat([weights.contiguous().view(torch.uint8), ids.contiguous().view(torch.uint8)], dim=1)
        arrived = both.new_empty(sum(received), both.shape[1])
        dist.all_to_all_single(
            arrived, both.index_select(0, copies.sources), received, sent, group=self.group
        )
        width = weights.shape[1] * weights.itemsize
        parts = arrived[:, :width], arrived[:, width:]
        # Copies, even of a single row: a part may begin where its dtype cannot.
        whole = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        return whole[0].view(weights.dtype), whole[1].view(ids.dtype)

    def _local(self, ids: Tensor, count: int) -> Local:
        """Return the calls for received rows with ``ids``, of which ``count`` are this rank's experts."""
        local = self.num_local_experts
        ids = ids - self.ep_mesh.get_local_rank() * local
        here = (ids >= 0) & (ids < local)
        skips_marks = getattr(self.config, "_experts_implementation", None) in _SKIP_MARKS
        if skips_marks and ids.numel() <= _SPARSE * count:
            ids = torch.where(here, ids, local).long()
            note_derived(ids, count, assigned, local)
            return Local(ids)
        pairs = copies_of(here, by_place=False).first(count)
        flat = pairs.places.reshape(-1).long()
        places = flat.new_zeros(count + 1).scatter_(0, flat, torch.arange(flat.shape[0], device=flat.device))
        places = places[:count]
        return Local(ids.reshape(-1).index_select(0, places).long().unsqueeze(1), pairs, places)

    def _sums(self, rows: Tensor, weights: Tensor, local: Local) -> Tensor:
        """Return the weighted sum of this rank's experts for each received row."""
        if local.pairs is None or local.places is None:
            return self._experts(rows, local.ids, weights)
        of_pairs = weights.reshape(-1).index_select(0, local.places).unsqueeze(1)
        return collect(self._experts(spread(rows, local.pairs), local.ids, of_pairs), local.pairs)

    def _experts(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if rows.shape[0]:
            return self.experts_forward(rows, ids, weights)  # type: ignore[no-any-return]
        # One row that adds nothing: the experts' weights get gradients of zero, which FSDP then reduces on
        # all ranks, and the graph stays connected, so that the backward exchanges run on all ranks.
        alone = self.experts_forward(
            rows.sum(0, keepdim=True), ids.new_zeros(1, ids.shape[1]), weights.sum(0, keepdim=True)
        )
        return alone[:0]  # type: ignore[no-any-return]

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows to the ranks, in the order of ranks, and return what they sent; differentiable."""
        arrived = all_to_all_single_autograd(rows.contiguous(), received, sent, self.group)
        return _arrived(arrived)


def _arrived(rows: Tensor) -> Tensor:
    return _Arrived.apply(rows)  # type: ignore[no-untyped-call,no-any-return]


class _Arrived(torch.autograd.Function):
    """Waits for an exchange: kernels must not get a tensor whose data may still arrive."""

    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        arrived: Tensor = wait_tensor(rows)  # type: ignore[no-untyped-call]
        return arrived

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.contiguous()


class _Sent(Saved, Protocol):
    group: Any
    sent: list[int]
    received: list[int]


class _Delivered(torch.autograd.Function):
    """The weights that arrived with the routing, as a function of those that were sent.

    A recompute gets those of the forward, whatever its own are, without an exchange.
    """

    @staticmethod
    def forward(
        ctx: _Sent, weights: Tensor, routing: Routing, group: object, sources: Tensor, places: Tensor
    ) -> Tensor:
        ctx.save_for_backward(sources, places)
        ctx.group, ctx.sent, ctx.received = group, routing.sent, routing.received
        return routing.weights.clone()

    @staticmethod
    def backward(ctx: _Sent, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = all_to_all_single_autograd(grad.contiguous(), ctx.sent, ctx.received, ctx.group)
        return collect(_arrived(back), Copies(*ctx.saved_tensors)), None, None, None, None


def in_recorded_order(recorded: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the ``weights`` of a recompute, which are for ``ids``, at the places of the ``recorded`` ids.

    An expert that the recompute no longer picks has weight 0 here, without gradient.
    """
    ids = ids.to(recorded.dtype)
    same = (recorded.unsqueeze(2) == ids.unsqueeze(1)) & (
        _occurrence(recorded).unsqueeze(2) == _occurrence(ids).unsqueeze(1)
    )
    ordered = weights.gather(1, same.to(torch.uint8).argmax(2))
    return torch.where(same.any(2), ordered, 0.0)


def _occurrence(ids: Tensor) -> Tensor:
    """How often an id occurs at earlier places of its row."""
    return (ids.unsqueeze(2) == ids.unsqueeze(1)).tril(-1).sum(2)


def _on_host(counts: Tensor) -> list[list[list[int]]]:
    """The only read of device memory in a call."""
    return counts.tolist()


def register() -> None:
    """Add this implementation to transformers' list, as ``"veomni"``."""
    from transformers.distributed.expert_parallel import EPImplementationInterface  # from 5.23 on

    EPImplementationInterface.register(NAME, OncePerRank)
