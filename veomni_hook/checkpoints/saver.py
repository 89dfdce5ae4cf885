"""Convert experts in memory to a checkpoint's layout, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from veomni_hook.checkpoints.converter import Layout
from veomni_hook.checkpoints.names import (
    DOWN,
    GATE_UP,
    ExpertName,
    Handler,
    Projections,
    is_expert_name,
    parsed,
)
from veomni_hook.checkpoints.sizes import ExpertSizes
from veomni_hook.errors import CheckpointError

__all__ = ["ExpertSaver"]


class ExpertSaver(Handler):
    """Converts the layout in memory to one layout on disk; made by the ``to_*`` factories.

    Memory: single experts are views of the fused tensor if it is contiguous; transposed tensors are copies.

    Args:
        sizes: sizes of the experts.
        layout: the layout on disk.
        projections: names of the projections of single experts on disk.
        under: handle only names with this prefix.
        block: name of the module around the experts on disk and in memory, if they differ.
    """

    def __init__(
        self,
        sizes: ExpertSizes,
        layout: Layout,
        *,
        projections: Projections,
        under: str = "",
        block: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(sizes, under, None if block is None else block[::-1])
        self._layout = layout
        self._projections = projections

    @torch.no_grad()
    def convert(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Take one parameter of the model; return the corresponding tensors of a checkpoint.

        Raises:
            CheckpointError: the tensor is not in the layout in memory, or came before.
        """
        if not self.can_handle(name):
            raise self._error(
                name,
                tensor,
                "does not belong to routed experts",
                "ask can_handle first, and save it as it is",
            )
        if name in self._done:
            raise self._error(name, tensor, "came before: a duplicate", "save every parameter once")
        parts = parsed(name)
        if parts is None and not is_expert_name(name):
            self._done.add(name)
            return [(self._renamed(name), tensor)]
        own = self.sizes.down if parts is not None and parts.role == DOWN else self.sizes.gate_up
        if parts is None or parts.expert is not None or tensor.shape != own:
            raise self._error(
                name,
                tensor,
                "is not in the layout in memory",
                f"understood are …experts.{GATE_UP} {list(self.sizes.gate_up)} "
                f"and …experts.{DOWN} {list(self.sizes.down)}",
            )
        self._done.add(name)
        self._modules.add(parts.module)
        if self._layout is Layout.PER_EXPERT:
            return self._single(parts, tensor)
        if self._layout is Layout.TRANSPOSED:
            tensor = tensor.transpose(1, 2)
        return [(self._renamed(name), tensor.contiguous())]

    def finalize(self) -> None:
        """Raise if only one of a module's two parameters was converted.

        Raises:
            CheckpointError: ``tensors`` names the missing ones.
        """
        wanted = {f"{module}.{role}" for module in self._modules for role in (GATE_UP, DOWN)}
        if missing := sorted(wanted - self._done):
            raise CheckpointError(
                f"{len(missing)} expert tensors are missing: {', '.join(missing)}",
                where="the model's parameters",
                fix="save every parameter of the model",
                tensors=missing,
            )

    def _single(self, parts: ExpertName, tensor: Tensor) -> list[tuple[str, Tensor]]:
        module = self._renamed(parts.module)
        if parts.role == DOWN:
            roles = {self._projections.down: tensor}
        else:
            gate, up = tensor.chunk(2, dim=1)
            roles = {self._projections.gate: gate, self._projections.up: up}
        return [
            (f"{module}.{expert}.{role}.weight", of_all[expert].contiguous())
            for expert in range(self.sizes.num_experts)
            for role, of_all in roles.items()
        ]
