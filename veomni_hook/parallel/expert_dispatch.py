"""Tokens to the ranks that hold their experts, and back: each token once for each rank.

transformers' ``all_to_all`` sends one row for each pair of a token and one of its experts. Here a token that
goes to several experts of one rank is sent there once, with their numbers and weights. The experts' rank
forms the weighted sum of its experts, and one row comes back. With eight of 128 experts on two ranks that is
a quarter of the rows. Where nearly every token goes to every rank, as there, all rows are sent everywhere:
then rows are on their way before the host has read anything, and wait for nothing.

Forward:   ids and weights [S, k] and rows [S, H] out, sums [S, H] back; S counts pairs of a token and a rank.
Backward:  the gradient of the sums out, the gradients of rows and weights back.
Recompute: rows out, sums back.
Host:      one read, of the numbers of rows and pairs; none in backward, none when a checkpoint is recomputed.
Saved:     the received rows and weights, and tables of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from veomni_hook.kernels.moe_experts.torch_routing import assigned
from veomni_hook.kernels.shared.host_values import note_derived, note_number
from veomni_hook.parallel.expert_copies import Copies, collect, copies_of, spread
from veomni_hook.parallel.expert_exchanges import Exchange, OfAll, OfWanted
from veomni_hook.parallel.expert_records import current, record_checkpoints
from veomni_hook.parallel.expert_units import announce, with_scaled_gradient
from veomni_hook.parallel.groups import over_hosts, own_group
from veomni_hook.patches.expert_release import NAME, dispatches

__all__ = ["OncePerRank", "register"]

#: All rows are sent everywhere from this share of pairs of a token and a rank on, with even routing.
_NEARLY_ALL = 0.85
#: Received pairs get a row each from so many places for each pair on. A place costs experts memory (their
#: first product), a row of its own costs a copy of the token.
_SPARSE = 2.5
#: Values of ``experts_implementation`` that skip places marked with the number of local experts. Not all of
#: upstream's loops do, and these also run where a kernel refuses. In releases that do not let this package
#: dispatch, marks need weights of 0, are written over, or give biases gradients that are not finite.
_SKIP_MARKS = ("batched_mm", "grouped_mm") if dispatches() else ()


@dataclass
class Routing:
    """What one call dispatched; all that a recompute needs.

    Attributes:
        ids: ``[T, k]``: the experts of this rank's tokens.
        weights: ``[M, k]``: the weights of the received rows, without gradient.
        exchange: how rows travel.
        asked: ``[M, k]``: the experts of the received rows, numbered from 1, and how many of them are this
            rank's (None: only the device knows); until ``local`` is made of it.
        local: what this rank's experts are asked for.
    """

    ids: Tensor
    weights: Tensor
    exchange: Exchange
    asked: tuple[Tensor, int | None] | None
    local: Local | None = None


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
        self.group = own_group(ep_mesh.get_group())
        self.host = over_hosts(self.group, "to tell numbers of tokens")
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
        # The host may wait for numbers while rows travel.
        rows = routing.exchange.there(hidden_states, partial(self._prepare, routing))
        weights = _Delivered.apply(top_k_weights, routing)  # type: ignore[no-untyped-call]
        summed = self._sums(rows, weights, routing).to(hidden_states.dtype)
        return with_scaled_gradient(routing.exchange.back(summed), 1 / self.divisor)

    @torch.no_grad()
    def _route(self, top_k_index: Tensor, top_k_weights: Tensor) -> Routing:
        size, (tokens, k) = self.ep_mesh.size(), top_k_index.shape
        everywhere = 1 - (1 - 1 / size) ** k >= _NEARLY_ALL
        if everywhere:
            numbers = torch.tensor([tokens])
            telling: Any = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.host, async_op=True)
        # Weights and ids in one message. Experts are numbered from 1: zeros ask for none.
        ids = top_k_index.to(torch.int32)
        parts = [part.contiguous().view(torch.uint8) for part in (top_k_weights, ids + 1)]
        message = torch.cat(parts, dim=1)
        exchange: Exchange
        count = None
        if everywhere:
            telling.wait()
            # At least one row: not every backend gathers none.
            exchange = OfAll(tokens, max(*numbers.tolist(), 1), self.group)
        else:
            exchange, count = self._of_wanted(ids)
        # Copies, even of a single row: a part may begin where its dtype cannot.
        weights, asked = (
            part.clone(memory_format=torch.contiguous_format)
            for part in torch.split(exchange.there(message), [part.shape[1] for part in parts], dim=1)
        )
        return Routing(ids, weights.view(top_k_weights.dtype), exchange, (asked.view(ids.dtype), count))

    def _of_wanted(self, ids: Tensor) -> tuple[OfWanted, int]:
        """Return the exchange of rows, and how many pairs this rank receives."""
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
        of_wanted = OfWanted(copies.first(sum(sent)), sent, received, self.group)
        return of_wanted, sum(of_rank for _, of_rank in incoming)

    def _prepare(self, routing: Routing) -> None:
        if routing.asked is not None:
            routing.local, routing.asked = self._local(*routing.asked), None

    @torch.no_grad()
    def _local(self, asked: Tensor, count: int | None) -> Local:
        """Return the calls for received rows, of whose places ``count`` are this rank's experts."""
        local = self.num_local_experts
        ids = asked - (self.ep_mesh.get_local_rank() * local + 1)
        here = (ids >= 0) & (ids < local)
        skips_marks = getattr(self.config, "_experts_implementation", None) in _SKIP_MARKS
        for_each = self.ep_mesh.size() if count is None else ids.numel() / max(count, 1)
        if skips_marks and for_each <= _SPARSE:
            marked = torch.where(here, ids, local).long()
            if count is None:
                note_number(marked, here.sum(), assigned, local)
            else:
                note_derived(marked, count, assigned, local)
            return Local(marked)
        if count is None:
            (count,) = _on_host(here.sum().view(1))
        pairs = copies_of(here, by_place=False).first(count)
        flat = pairs.places.reshape(-1).long()
        places = flat.new_zeros(count + 1).scatter_(0, flat, torch.arange(flat.shape[0], device=flat.device))
        places = places[:count]
        return Local(ids.reshape(-1).index_select(0, places).long().unsqueeze(1), pairs, places)

    def _sums(self, rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of this rank's experts for each received row."""
        local = routing.local
        assert local is not None  # noqa: S101 - `_prepare` was called
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


class _Delivered(torch.autograd.Function):
    """The weights that arrived with the routing, as a function of those that were sent.

    A recompute gets those of the forward, whatever its own are, without an exchange.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, routing: Routing) -> Tensor:
        ctx.exchange = routing.exchange
        return routing.weights.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.back(grad), None


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


def _on_host(counts: Tensor) -> Any:
    """A read of device memory; a call has one, here or by `note_number`."""
    return counts.tolist()


def register() -> None:
    """Add this implementation to transformers' list, as ``"veomni"``."""
    from transformers.distributed.expert_parallel import EPImplementationInterface  # from 5.23 on

    EPImplementationInterface.register(NAME, OncePerRank)
