"""The memory of a training step before it runs: where it goes, which length fits, what reaches another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from veomni_hook.errors import InputError
from veomni_hook.memory.budget import SHARE
from veomni_hook.memory.lengths import longest, resized, shape_of
from veomni_hook.memory.prediction import predict
from veomni_hook.memory.remedies import REMEDIES, of_one_row
from veomni_hook.sizes import bytes_of, readable

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["MemoryPlan", "asked", "planned"]

#: Of the peak: smaller parts are shown as one.
LEAST = 0.005
#: What `veomni_hook.explain(model, plan=...)` takes.
KEYS = ("batch", "length", "inputs", "optimizer", "memory", "reach")


@dataclass(frozen=True)
class MemoryPlan:
    """The predicted memory of a step, in bytes.

    Attributes:
        subject: the model's class.
        shape: of the batch: sequences and tokens of each.
        optimizer: its class; empty: none.
        device: its name.
        peak: the most that lives at once.
        parts: what lives then, by part, the largest first.
        memory: what a step may take; None: unknown.
        longest: the tokens of the longest sequences that fit; None: unknown.
        reach: the length that was asked for; None: no other.
        reached: the settings with which this length was predicted, and its peak, until one fits.
    """

    subject: str
    shape: tuple[int, int]
    optimizer: str
    device: str
    peak: int
    parts: tuple[tuple[str, int], ...]
    memory: int | None = None
    longest: int | None = None
    reach: int | None = None
    reached: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> MemoryPlan:
        """Return the plan that `to_dict` gave, also after it was JSON."""
        rows = {name: tuple(map(tuple, facts[name])) for name in ("parts", "reached")}
        return cls(**{**facts, **rows, "shape": tuple(facts["shape"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-ready values."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the parts: name, size, share of the peak."""
        return [(name, readable(size), f"{100 * size / self.peak:.1f} %") for name, size in self._shown()]

    def _shown(self) -> list[tuple[str, int]]:
        """Return the parts, the small ones as one."""
        large = [(name, size) for name, size in self.parts if size >= LEAST * self.peak]
        rest = sum(size for _, size in self.parts) - sum(size for _, size in large)
        return [*large, *([("others", rest)] if rest else [])]

    def to_html(self) -> str:
        """Return a page with the parts as bars."""
        from veomni_hook.tools.report.page import page

        shown = self._shown()
        most = max((size for _, size in shown), default=1)
        widths = [100 * size / most for _, size in shown]
        return page(
            "memory_plan.html",
            title="veomni-hook plan",
            lead=self.title(),
            contents=(),
            statements=list(self.statements()),
            rows=[(*row, width) for row, width in zip(self.rows(), widths, strict=True)],
        )

    def title(self) -> str:
        """Return what was predicted."""
        rows, tokens = self.shape
        return (
            f"{self.subject}, {rows} x {tokens:,} tokens, {self.optimizer or 'no optimizer'}, {self.device}:"
            f" {readable(self.peak)} at the peak of a step"
        )

    def statements(self) -> Iterator[str]:
        """Yield sentences on what fits, and on what reaches the length that was asked for."""
        if self.memory is not None and self.longest is not None:
            fits = f"up to {self.longest:,} tokens a sequence" if self.longest else "no sequence fits"
            yield f"In {readable(self.memory)}: {fits}."
        for settings, peak in self.reached:
            words = "" if self.memory is None else ", fits" if peak <= self.memory else ", too much"
            yield f"{self.reach:,} tokens, {settings}: {readable(peak)}{words}"
        if self.reached and self.memory is not None and self.reached[-1][1] > self.memory:
            yield "No setting reaches it: use more GPUs (sequence parallelism, FSDP), or train adapters."

    def __str__(self) -> str:
        rows = self.rows()
        width = max((len(name) for name, _, _ in rows), default=0)
        lines = (f"  {name.ljust(width)}  {size:>11}  {share:>6}" for name, size, share in rows)
        return "\n".join([self.title(), *lines, *(f"  {words}" for words in self.statements())])


def planned(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    memory: int | None = None,
    reach: int | None = None,
    device: torch.device | None = None,
) -> MemoryPlan:
    """Return the plan for a step of ``model`` with a batch; `veomni_hook.memory.prediction` says of what.

    Args:
        model: nothing of it is changed.
        inputs: the batch, as keyword arguments.
        optimizer: None: none.
        memory: the bytes that a step may take; None: those of the device, if it is a GPU.
        reach: a length to reach with other settings, if the batch's own do not.
        device: where the step will run; None: where the model is.
    """
    import torch

    where = device or next(model.parameters()).device
    is_gpu = where.type == "cuda" and torch.cuda.is_available()
    if memory is None and is_gpu:
        memory = int(SHARE * torch.cuda.get_device_properties(where).total_memory)

    def peak(batch: Mapping[str, Any]) -> int:
        return predict(model, batch, optimizer=optimizer, device=where).peak

    found = predict(model, inputs, optimizer=optimizer, device=where)
    shape, most, reached = shape_of(inputs), None, list[tuple[str, int]]()
    if memory is not None:
        most = longest(lambda length: peak(resized(inputs, length)), shape[1], memory)
    if reach is not None:
        reached = list(_reaching(model, resized(inputs, reach), peak, memory))
    return MemoryPlan(
        type(model).__name__,
        shape,
        "" if optimizer is None else type(optimizer).__name__,
        torch.cuda.get_device_name(where) if is_gpu else where.type,
        found.peak,
        tuple(sorted(found.parts.items(), key=lambda row: -row[1])),
        memory,
        most,
        reach,
        tuple(reached),
    )


def _reaching(
    model: nn.Module, batch: Mapping[str, Any], peak: Callable[[Mapping[str, Any]], int], memory: int | None
) -> Iterator[tuple[str, int]]:
    """Yield settings and the peak of a batch with them, up to one that fits."""
    applied: list[tuple[str, Callable[[], AbstractContextManager[None] | None]]] = [("as it is", nullcontext)]
    applied += [(name, partial(remedy, model)) for name, remedy in REMEDIES.items()]
    last = applied[0]
    for batches, suffix in ((batch, ""), (of_one_row(batch), ", one sequence a batch")):
        for name, make in applied if batches is batch else [last]:
            block = make()
            if block is None or batches is None:
                continue
            last = name, make
            with block:
                size = peak(batches)
            yield f"{name}{suffix}", size
            if memory is not None and size <= memory:
                return


def asked(model: nn.Module, plan: Mapping[str, Any], device: str | None) -> MemoryPlan:
    """Return the plan that `veomni_hook.explain` was asked for. Raises InputError for unknown keys."""
    import torch

    if unknown := sorted(plan.keys() - set(KEYS)):
        raise InputError(
            f"a plan has no {', '.join(map(repr, unknown))}",
            where="explain(model, plan=...)",
            fix=f"use some of {', '.join(KEYS)}",
        )
    inputs = plan.get("inputs")
    if inputs is None:
        shape = int(plan.get("batch", 1)), int(plan.get("length", 4096))
        ids = torch.ones(shape, dtype=torch.long)
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    optimizer = plan.get("optimizer", "adamw")
    if isinstance(optimizer, str):
        kinds = {kind.lower(): kind for kind in dir(torch.optim) if kind[0].isupper()}
        if optimizer.lower() not in kinds:
            raise InputError(
                f"torch.optim has no {optimizer!r}",
                where="explain(model, plan=...)",
                fix="pass the optimizer itself, or None",
            )
        make = getattr(torch.optim, kinds[optimizer.lower()])
        optimizer = make([weight for weight in model.parameters() if weight.requires_grad])
    memory = plan.get("memory")
    return planned(
        model,
        inputs,
        optimizer=optimizer,
        memory=None if memory is None else bytes_of(memory),
        reach=plan.get("reach"),
        device=None if device is None else torch.device(device),
    )
