"""Convert a checkpoint's expert tensors to the model's: one tensor in, completed tensors out.

Memory: one fused tensor for each partly received ``gate_up_proj`` or ``down_proj``, plus the current tensor.
With ``into``, experts are copied directly into the model's memory and nothing is held.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from veomni_hook.checkpoints.names import (
    DOWN,
    GATE_UP,
    LINEAR,
    NUMBERED,
    ExpertName,
    Handler,
    Projections,
    is_expert_name,
    parsed,
)
from veomni_hook.checkpoints.sizes import ExpertSizes
from veomni_hook.errors import CheckpointError

__all__ = ["ExpertConverter", "Layout", "TensorConverter"]

_SHOWN = 20
_SPELT = " or ".join(f"{spelling.gate}/{spelling.up}/{spelling.down}" for spelling in (LINEAR, NUMBERED))
_NAMES = (
    f"understood are …experts.{GATE_UP}, …experts.{DOWN} and …experts.<number>.<{_SPELT}>.weight; "
    "biases, scales and packed weights need a loader of their own"
)


@runtime_checkable
class TensorConverter(Protocol):
    """The interface for streaming loaders and savers: ``can_handle``, ``convert``, then ``finalize``.

    Tensors may come in any order. The converter ignores those for which ``can_handle`` returns False.
    """

    def can_handle(self, name: str) -> bool:
        """Whether ``convert`` accepts this tensor or raises an error about it; depends on the name only."""

    def convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Take one tensor; return the tensors completed by it, with their names: none, one or several."""

    def finalize(self) -> None:
        """Raise if anything is incomplete; call it after the last tensor has been converted."""


class Layout(StrEnum):
    """Layouts of experts in a checkpoint; E experts, hidden size H, intermediate size I."""

    #: gate and up `[I, H]`, down `[H, I]`, for each expert.
    PER_EXPERT = "per_expert"
    #: ``gate_up_proj`` `[E, 2I, H]`, ``down_proj`` `[E, H, I]`: the layout in memory.
    FUSED = "fused"
    #: ``gate_up_proj`` `[E, H, 2I]`, ``down_proj`` `[E, I, H]`.
    TRANSPOSED = "fused_transposed"


@dataclass(slots=True)
class _Open:
    """A fused tensor in which some experts are still missing; ``module`` and ``spelling`` as on disk."""

    tensor: Tensor
    module: str
    spelling: Projections
    filled: set[tuple[int, str]] = field(default_factory=set)


class ExpertConverter(Handler):
    """Converts expert tensors of the given layouts to the layout in memory; made by the ``from_*`` factories.

    Args:
        sizes: sizes of the experts.
        layouts: the layouts that may occur. The layout in memory is always allowed; its tensors are returned
            as the same object.
        square: the layout of a fused tensor that has the same shape in both layouts (2I == H or I == H).
            Without it, such a tensor is an error if both layouts may occur.
        expected: names of the model's parameters. ``convert`` raises for an expert tensor of any other
            parameter, ``finalize`` for missing ones. Names of other tensors are ignored.
        into: the model's parameters by name; implies ``expected``. Weights are copied into them, and
            ``convert`` returns them. If an error is raised, a module may be partly overwritten.
        under: handle only names with this prefix, for parts of a model whose experts have different sizes.
        block: name of the module around the experts on disk and in memory, if they differ. Everything in it
            is renamed, including the router's weight.

    Dtypes do not change. Devices do not change either, except that ``into`` keeps its tensors' devices.
    """

    def __init__(
        self,
        sizes: ExpertSizes,
        layouts: Collection[Layout],
        *,
        square: Layout | None = None,
        expected: Iterable[str] | None = None,
        into: Mapping[str, Tensor] | None = None,
        under: str = "",
        block: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(sizes, under, block)
        self._layouts = frozenset(layouts) | {Layout.FUSED}
        self._square = square
        self._into = into
        self._expected: frozenset[str] | None = None
        if expected is not None or into is not None:
            names = {*(expected or ()), *(into or ())}
            self._expected = frozenset(name for name in names if self._is_target(name))
        self._open: dict[str, _Open] = {}

    @torch.no_grad()
    def convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Take one tensor of the checkpoint; return the parameter that it completes, if any.

        Returns a list, because a generator that is not iterated would silently do nothing.

        Raises:
            CheckpointError: the tensor's name or shape is unknown, it came before, it belongs to an expert or
                module that the model does not have, or its dtype or device differs from the other parts.
        """
        if not self.can_handle(name):
            raise self._error(
                name,
                tensor,
                "does not belong to routed experts",
                "ask can_handle first, and load it as it is",
            )
        renamed = self._renamed(name)
        if not is_expert_name(name):
            if renamed in self._done:
                raise self._error(name, tensor, "came before: a duplicate")
            self._done.add(renamed)
            return [(renamed, tensor)]
        if (parts := parsed(renamed)) is None:
            raise self._error(
                name, tensor, "is not the name of an expert tensor that this converter knows", _NAMES
            )
        if self._expected is not None and parts.target not in self._expected:
            raise self._error(name, tensor, f"belongs to {parts.target}, which the model does not have")
        self._modules.add(parts.module)
        if parts.target in self._done:
            raise self._error(name, tensor, f"comes after {parts.target} was complete: a duplicate")
        if parts.expert is None:
            return [(parts.target, self._fused(name, tensor, parts))]
        return self._one_expert(name, tensor, parts, parts.expert)

    def finalize(self) -> None:
        """Raise if any expert tensor is missing.

        Raises:
            CheckpointError: ``tensors`` names every missing tensor: those of single experts if some experts
                of the module have come, otherwise the module's fused tensors.
        """
        if self._expected is None and not self._modules:
            raise CheckpointError(
                "no expert tensor was found",
                where="finalize",
                fix="the checkpoint is another model's; pass expected=[] where no experts are to be loaded",
            )
        lines, missing = [], []
        for target, tensors, line in self._gaps():
            lines.append(line)
            missing += tensors or [target]
        if not missing:
            return
        if len(lines) > _SHOWN:
            lines = [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more tensors"]
        raise CheckpointError(
            f"{len(missing)} expert tensors are missing:\n    " + "\n    ".join(lines),
            where=f"experts of {self.sizes.num_experts}, hidden {self.sizes.hidden_size}, "
            f"intermediate {self.sizes.intermediate_size}",
            fix="the checkpoint is incomplete (a missing shard?), or the config is another model's",
            tensors=missing,
        )

    def _gaps(self) -> Iterable[tuple[str, list[str], str]]:
        """Every incomplete parameter: its name, missing tensors of single experts, and a line about it."""
        begun = {f"{module}.{role}" for module in self._modules for role in (GATE_UP, DOWN)}
        for target in sorted((begun | (self._expected or frozenset())) - self._done):
            if (part := self._open.get(target)) is None:
                yield target, [], f"{target}: no part of it"
                continue
            lacking: dict[str, list[int]] = {}
            for role in self._roles(target):
                gone = [e for e in range(self.sizes.num_experts) if (e, role) not in part.filled]
                if gone:
                    lacking[role] = gone
            word = {role: getattr(part.spelling, role) for role in lacking}
            names = [
                f"{part.module}.{expert}.{word[role]}.weight" for role in lacking for expert in lacking[role]
            ]
            said = "; ".join(
                f"{word[role]} of expert{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
                for role, gone in lacking.items()
            )
            yield target, names, f"{part.module}: {said}"

    def _one_expert(
        self, name: str, tensor: Tensor, parts: ExpertName, expert: int
    ) -> list[tuple[str, Tensor]]:
        """Store one projection of one expert in its place."""
        if Layout.PER_EXPERT not in self._layouts:
            raise self._error(name, tensor, "belongs to a single expert, which this converter does not read")
        count, hidden, inter = self.sizes.num_experts, self.sizes.hidden_size, self.sizes.intermediate_size
        if expert >= count:
            raise self._error(
                name, tensor, f"is of expert {expert}, and the model has {count} (0 to {count - 1})"
            )
        wanted = (hidden, inter) if parts.role == "down" else (inter, hidden)
        if tensor.shape != wanted:
            raise self._error(name, tensor, f"does not have the shape {list(wanted)}", self._shapes())
        if (part := self._open.get(parts.target)) is None:
            module = name.rsplit(".", 3)[0]
            part = _Open(self._memory(name, tensor, parts), module, parts.spelling)
            self._open[parts.target] = part
        if (expert, parts.role) in part.filled:
            raise self._error(name, tensor, "came before: a duplicate")
        if tensor.dtype != part.tensor.dtype or (self._into is None and tensor.device != part.tensor.device):
            raise self._error(
                name, tensor, f"joins others of {part.tensor.dtype} on {part.tensor.device} in {parts.target}"
            )
        rows = part.tensor[expert]
        if parts.role != "down":
            rows = rows[:inter] if parts.role == "gate" else rows[inter:]
        rows.copy_(tensor)
        part.filled.add((expert, parts.role))
        if len(part.filled) < count * len(self._roles(parts.target)):
            return []
        del self._open[parts.target]
        self._done.add(parts.target)
        return [(parts.target, part.tensor)]

    def _fused(self, name: str, tensor: Tensor, parts: ExpertName) -> Tensor:
        """Return the parameter for a tensor of all experts."""
        if parts.target in self._open:
            raise self._error(name, tensor, "came in parts before: a duplicate")
        own = self.sizes.gate_up if parts.role == GATE_UP else self.sizes.down
        turned = (own[0], own[2], own[1])
        layout = Layout.FUSED if tensor.shape == own else None
        if Layout.TRANSPOSED in self._layouts and tensor.shape == turned:
            layout = Layout.TRANSPOSED if layout is None else self._square
            if layout is None:
                raise self._error(
                    name,
                    tensor,
                    "has one shape in both fused layouts, so its layout cannot be found by shape",
                    "say which it is: square='fused' or square='fused_transposed'",
                )
        if layout is None:
            raise self._error(name, tensor, "has an unknown shape", self._shapes())
        converted = tensor.transpose(1, 2) if layout is Layout.TRANSPOSED else tensor
        if self._into is not None:
            converted = self._memory(name, tensor, parts).copy_(converted)
        elif layout is Layout.TRANSPOSED:
            converted = converted.contiguous()
        self._done.add(parts.target)
        return converted

    def _memory(self, name: str, tensor: Tensor, parts: ExpertName) -> Tensor:
        """The tensor to write to: the model's own, or a new one."""
        own = self.sizes.down if parts.target.endswith(DOWN) else self.sizes.gate_up
        if self._into is None:
            return torch.empty(own, dtype=tensor.dtype, device=tensor.device)
        memory = self._into[parts.target] if parts.target in self._into else None
        if (
            memory is None
            or memory.shape != own
            or memory.dtype != tensor.dtype
            or (memory.is_meta and not tensor.is_meta)
        ):
            actual = (
                "nothing" if memory is None else f"{list(memory.shape)} {memory.dtype} on {memory.device}"
            )
            raise self._error(
                name,
                tensor,
                f"cannot be copied into {parts.target}: that is {actual}, not {list(own)} {tensor.dtype}",
                "give the model memory and the checkpoint's dtype first; nothing is cast here",
            )
        return memory

    def _is_target(self, name: str) -> bool:
        parts = parsed(name)
        return parts is not None and parts.expert is None and name.startswith(self._renamed(self._under))

    @staticmethod
    def _roles(target: str) -> tuple[str, ...]:
        return ("down",) if target.endswith(DOWN) else ("gate", "up")

    def _shapes(self) -> str:
        (count, double, hidden), inter = self.sizes.gate_up, self.sizes.intermediate_size
        known = []
        if Layout.PER_EXPERT in self._layouts:
            known.append(f"one expert's gate and up [{inter}, {hidden}], down [{hidden}, {inter}]")
        known.append(f"{GATE_UP} [{count}, {double}, {hidden}], {DOWN} [{count}, {hidden}, {inter}]")
        if Layout.TRANSPOSED in self._layouts:
            known.append(
                f"{GATE_UP} [{count}, {hidden}, {double}], {DOWN} [{count}, {inter}, {hidden}] (transposed)"
            )
        return "understood are " + "; ".join(known)
