"""Made-up runs of a comparison, and the report of them."""

from __future__ import annotations

from veomni_hook.tools.compare.report import report_of
from veomni_hook.tools.compare.runs import Run

STEADY = [1.0, 1.01, 0.99, 1.0, 1.0, 1.0, 1.0, 1.0]

KERNEL = {
    "model": "M", "op": "rms_norm", "variant": "<v>", "backend": "torch", "reason": "why", "ran": True,
    "places": 2, "calls": 8,
}  # fmt: skip


def run(hooked: bool, turn: int, seconds: list[float], losses: list[float], **changes) -> Run:
    ends = [10.0]
    for each in seconds:
        ends.append(ends[-1] + each)
    facts = {"peak": 2**30, "memory": "device", "precision": "float32", "world": 1, "device_name": "cpu"}
    facts |= {"optimizer": "AdamW", "models": ["M"], "kernels": [KERNEL] if hooked else []}
    return Run(
        hooked, turn, stopped=True, attached=True, times=ends, first_call=9.0, losses=losses,
        tokens=[100] * len(ends), facts={**facts, **changes},
    )  # fmt: skip


def runs(off: list[list[float]], on: list[list[float]], plain=(2.0, 1.0), hooked=(2.0, 1.0)) -> list[Run]:
    pairs = zip(off, on, strict=True)
    return [
        each
        for turn, (a, b) in enumerate(pairs, start=1)
        for each in (run(False, turn, a, list(plain)), run(True, turn, b, list(hooked)))
    ]


def report(*args, **kwargs) -> dict:
    return report_of(runs(*args, **kwargs), ["train.py"], 20, 3)
