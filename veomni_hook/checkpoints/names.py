"""Parse the names of expert tensors.

There are three forms; their parts differ, so they cannot be confused:

    <module>.experts.7.gate_proj.weight     one projection of one expert (or w1, w3, w2: gate, up, down)
    <module>.experts.gate_up_proj           all experts, gate and up in one
    <module>.experts.down_proj              all experts
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DOWN", "GATE_UP", "LINEAR", "NUMBERED", "ExpertName", "Projections", "is_expert_name", "parsed"]

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
