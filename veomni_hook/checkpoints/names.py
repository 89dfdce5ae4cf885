"""The names of expert tensors: parsed, and changed between a checkpoint and a model.

There are three forms; their parts differ, so they cannot be confused:

    <module>.experts.7.gate_proj.weight     one projection of one expert (or w1, w3, w2: gate, up, down)
    <module>.experts.gate_up_proj           all experts, gate and up in one
    <module>.experts.down_proj              all experts
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from veomni_hook.checkpoints.sizes import ExpertSizes
from veomni_hook.errors import CheckpointError

__all__ = [
    "DOWN",
    "GATE_UP",
    "LINEAR",
    "NUMBERED",
    "ExpertName",
    "Handler",
    "Projections",
    "is_expert_name",
    "parsed",
]

GATE_UP = "gate_up_proj"
DOWN = "down_proj"

_EXPERTS = "experts"
_NUMBER = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True, slots=True)
class Projections:
    """Names of the three projections of one expert on disk."""

    gate: str
    up: str
    down: str


LINEAR = Projections("gate_proj", "up_proj", "down_proj")
NUMBERED = Projections("w1", "w3", "w2")

# The two spellings have no word in common.
_ROLES = {
    getattr(spelling, role): (role, spelling)
    for spelling in (LINEAR, NUMBERED)
    for role in ("gate", "up", "down")
}


@dataclass(frozen=True, slots=True)
class ExpertName:
    """A parsed name.

    Attributes:
        module: the experts module, up to and including ``experts``.
        role: ``gate``, ``up`` or ``down`` of one expert; ``gate_up_proj`` or ``down_proj`` of all.
        expert: the expert's number, None for tensors of all experts.
        spelling: the names of the projections of single experts in this checkpoint.
    """

    module: str
    role: str
    expert: int | None = None
    spelling: Projections = LINEAR

    @property
    def target(self) -> str:
        """The parameter that this tensor becomes, or becomes a part of."""
        if self.expert is None:
            return f"{self.module}.{self.role}"
        return f"{self.module}.{DOWN if self.role == 'down' else GATE_UP}"


def is_expert_name(name: str) -> bool:
    """Whether a tensor belongs to routed experts; shared experts are in another module."""
    return _EXPERTS in name.split(".")


def parsed(name: str) -> ExpertName | None:
    """Parse a name; None if it has none of the three forms."""
    parts = name.split(".")
    if _EXPERTS not in parts:
        return None
    at = parts.index(_EXPERTS) + 1
    module, rest = ".".join(parts[:at]), parts[at:]
    if rest in ([GATE_UP], [DOWN]):
        return ExpertName(module, rest[0])
    if len(rest) == 3 and rest[2] == "weight" and rest[1] in _ROLES and _NUMBER.fullmatch(rest[0]):
        role, spelling = _ROLES[rest[1]]
        return ExpertName(module, role, int(rest[0]), spelling)
    return None


class Handler:
    """What converters and savers share: which tensors they take, and what they call them.

    Args:
        sizes: sizes of the experts.
        under: handle only names with this prefix.
        block: name of the module around the experts in what comes and in what is returned, if they differ.
    """

    def __init__(self, sizes: ExpertSizes, under: str, block: tuple[str, str] | None) -> None:
        self.sizes = sizes
        self._under = under
        self._block = block
        self._done: set[str] = set()
        self._modules: set[str] = set()

    def can_handle(self, name: str) -> bool:
        """Whether the tensor belongs to routed experts, or to a block that gets another name."""
        if not name.startswith(self._under):
            return False
        return is_expert_name(name) or (self._block is not None and self._block[0] in name.split("."))

    def _renamed(self, name: str) -> str:
        if self._block is None:
            return name
        before, after = self._block
        return ".".join(after if part == before else part for part in name.split("."))

    @staticmethod
    def _error(name: str, tensor: Tensor, what: str, fix: str = "") -> CheckpointError:
        return CheckpointError(
            f"{name} {list(tensor.shape)} {tensor.dtype} {what}",
            where=name,
            fix=fix or "the checkpoint is not this model's, or was read twice",
            tensors=[name],
        )
