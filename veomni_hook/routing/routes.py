"""`Routes`: the experts of every token, layer by layer, in as few bytes as their numbers need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from veomni_hook.errors import RoutingError

__all__ = ["Call", "Routes", "compact"]

_WHERE = "Routes"


@dataclass(frozen=True)
class Call:
    """What one call of a router chose.

    Attributes:
        experts: how many there are.
        ids: ``[tokens, top_k]``, uint8, int16 or int32: the experts of each token, best first.
        weights: ``[tokens, top_k]`` as the router's formula gives them, without a gradient; or None.
    """

    experts: int
    ids: torch.Tensor
    weights: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """Return the call with both tensors changed."""
        weights = None if self.weights is None else change(self.weights)
        return replace(self, ids=change(self.ids), weights=weights)


def compact(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Return a copy of ``ids`` in the smallest dtype for the numbers of ``experts``."""
    if experts <= 1 << 8:
        dtype = torch.uint8
    else:
        dtype = torch.int16 if experts <= 1 << 15 else torch.int32
    return ids.detach().to(dtype, copy=True)


class Routes:
    """The experts of every token, for each call of each router, by the router's name in the model.

    They hold whole sequences: if processes share them, every process holds all positions. They can be
    pickled. Iterating them gives the names.

    Args:
        ids: by the router's name, the experts of each token, ``[..., top_k]``, of any integer dtype; or
            several such tensors, one for each call of the router. All dimensions but the last become one.
            They are checked, which waits for the device that they are on.
        experts: how many experts a layer has.

    Raises:
        RoutingError: a number is not that of an expert, or a token has an expert twice.
    """

    def __init__(self, ids: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], experts: int) -> None:
        self._calls: dict[str, list[Call]] = {}
        for name, recorded in ids.items():
            for tensor in (recorded,) if isinstance(recorded, torch.Tensor) else recorded:
                self._calls.setdefault(name, []).append(_checked(name, tensor, experts))

    @classmethod
    def _of(cls, calls: Mapping[str, Iterable[Call]]) -> Routes:
        routes = cls.__new__(cls)
        routes._calls = {name: list(of_router) for name, of_router in calls.items()}
        return routes

    @property
    def calls(self) -> Mapping[str, Sequence[Call]]:
        """By the router's name, what each of its calls chose."""
        return self._calls

    @property
    def nbytes(self) -> int:
        """How many bytes the tensors take."""
        calls = [call for of_router in self._calls.values() for call in of_router]
        tensors = [tensor for call in calls for tensor in (call.ids, call.weights) if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the experts ``[tokens, top_k]`` that the router ``name`` chose in its only call."""
        return self._only(name).ids

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __contains__(self, name: object) -> bool:
        return name in self._calls

    def keys(self) -> KeysView[str]:
        """Return the routers' names."""
        return self._calls.keys()

    def __repr__(self) -> str:
        counts = {len(calls) for calls in self._calls.values()}
        times = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else "".join(map(str, counts)) or "0"
        return f"Routes({len(self)} routers, calls of each: {times}, {self.nbytes} bytes)"

    def to(self, device: torch.device | str) -> Routes:
        """Return the same routes on another device."""
        return self._of({
            name: [call.map(lambda tensor: tensor.to(device)) for call in calls]
            for name, calls in self._calls.items()
        })  # fmt: skip

    def rows(self, start: int, stop: int) -> Routes:
        """Return the routes of the tokens ``start`` to ``stop``, such as those of a micro-batch.

        Tokens are numbered as the router gets them: row by row of the batch. Every router must have been
        called once.
        """
        calls = {name: [self._only(name).map(lambda tensor: tensor[start:stop])] for name in self._calls}
        return self._of(calls)

    @classmethod
    def joined(cls, parts: Iterable[Routes]) -> Routes:
        """Return the routes of several batches as those of one, with their tokens one after the other.

        Every router must have been called once in each of ``parts``, which must be alike.
        """
        parts = list(parts)
        first = parts[0]
        if any(part._calls.keys() != first._calls.keys() for part in parts):
            raise RoutingError(
                "the routes to be joined are not those of the same routers",
                where=_WHERE,
                fix="join routes of one model, recorded in the same way",
            )
        return cls._of({name: [_as_one([part._only(name) for part in parts])] for name in first._calls})

    def as_sequences(self, batch: int) -> Routes:
        """Return the routes of several calls that continue the same sequences as those of one call.

        For a rollout: `generate` calls the model for the prompts, and again for each new token. The last
        token of its result was never an input, so it has no route: replay with all tokens but that one.

        Args:
            batch: how many sequences every call had: the rows of what `generate` returns.

        Raises:
            RoutingError: the tokens of a call are no ``batch`` equal parts, or the calls of a router differ
                in the number of experts, or only some have weights.
        """
        for name, calls in self._calls.items():
            for call in calls:
                if batch < 1 or len(call.ids) % batch:
                    raise RoutingError(
                        f"a call of {name} had {len(call.ids)} tokens: not the same number for each of "
                        f"{batch} sequences",
                        where=f"{_WHERE}.as_sequences",
                        fix="give the number of rows that the model was called with, and record one rollout",
                    )
        return self._of({name: [_as_one(calls, batch)] for name, calls in self._calls.items() if calls})

    def _add(self, name: str, call: Call) -> None:
        self._calls.setdefault(name, []).append(call)

    def _only(self, name: str) -> Call:
        calls = self._calls.get(name)
        if calls is None:
            raise RoutingError(
                f"there are no routes of a router {name!r}",
                where=_WHERE,
                fix=f"the first of {len(self)} routers is {next(iter(self._calls), None)!r}",
            )
        if len(calls) != 1:
            raise RoutingError(
                f"the router {name} was called {len(calls)} times",
                where=_WHERE,
                fix="record one forward pass, or use .calls, which has every call; after `generate`, "
                "as_sequences(batch) makes one call of all",
            )
        return calls[0]


def _as_one(calls: Sequence[Call], batch: int = 1) -> Call:
    """Return one call: for each of ``batch`` equal parts of the calls' tokens, those of all calls in turn."""
    weights = [call.weights for call in calls if call.weights is not None]
    if len({(call.experts, call.ids.shape[1]) for call in calls}) > 1 or len(weights) not in (0, len(calls)):
        raise RoutingError(
            "the routes to be joined differ in the number of experts, or only some have weights",
            where=_WHERE,
            fix="join routes of one model, recorded in the same way",
        )
    ids = _in_parts([call.ids for call in calls], batch)
    return Call(calls[0].experts, ids, _in_parts(weights, batch) if weights else None)


def _in_parts(tensors: Sequence[torch.Tensor], batch: int) -> torch.Tensor:
    by_row = [tensor.view(batch, len(tensor) // batch, tensor.shape[1]) for tensor in tensors]
    return torch.cat(by_row, 1).flatten(0, 1)


def _checked(name: str, ids: torch.Tensor, experts: int) -> Call:
    flat = ids.reshape(-1, ids.shape[-1]).long()
    wrong = ""
    if flat.numel():
        if not bool(((flat >= 0) & (flat < experts)).all()):
            wrong = f"has numbers outside of 0 to {experts - 1}"
        elif bool((flat.sort(-1)[0].diff(dim=-1) == 0).any()):
            wrong = "has an expert twice for one token"
    if wrong:
        raise RoutingError(
            f"the tensor {list(ids.shape)} for {name} {wrong}",
            where=_WHERE,
            fix="give the numbers of top_k different experts for each token, from 0 on",
        )
    return Call(experts, compact(flat, experts))
