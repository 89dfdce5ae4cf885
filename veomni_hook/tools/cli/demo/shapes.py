"""What the demo's processes return, and the report that is made of both: the shape of `report.json`."""

from __future__ import annotations

from typing import TypedDict

from veomni_hook.tools.facts import Facts

__all__ = ["Machine", "Measured", "Part", "Report", "Training"]


class Machine(TypedDict):
    """Where a process ran."""

    transformers: str
    torch: str
    device: str
    device_name: str
    threads: int


class Training(TypedDict):
    """What came of one way of training in one process.

    ``answer`` is the model's before training; ``step_seconds`` are those of the steps by turns;
    ``peak_bytes`` are those above the weights; ``kernels`` has the op and the backend of each that ran.
    """

    losses: list[float]
    answer: str
    tokens: int
    parameters: int
    model_type: str
    step_seconds: list[float]
    peak_bytes: int
    kernels: list[tuple[str, str]]


class Measured(Machine):
    """What one process returns: its trainings by their names."""

    parts: dict[str, Training]


class Part(TypedDict):
    """One way of training in both processes; ``differences`` are those of the losses, relative, by step."""

    title: str
    plain: Training
    hooked: Training
    differences: list[float]
    problems: list[str]


class Report(Machine):
    """All parts; ``step_time`` is a `significance.Comparison` of the step times of all of them."""

    model: str
    tolerance: float
    parts: dict[str, Part]
    step_time: Facts
    equal: bool
