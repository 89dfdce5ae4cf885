"""Run VeOmni's configs of one device on both sides and print what differs, as one line of JSON.

Arguments: the device, and the folders to run.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import torch

import veomni_hook
import veomni_hook.install
from tests.veomni.configurations import CLASSES
from tests.veomni.inputs import inputs
from tests.veomni.sides import calls, differences, model, prepare, side
from tests.veomni.standins import stand_ins
from tests.veomni.unable import UNABLE


def compared(folder: str, device: str) -> dict[str, Any]:
    """One config: for every call what both sides gave, and what ran on ours."""
    facts: dict[str, Any] = {"calls": {}, "rows": []}
    unable = UNABLE.get((folder, device))
    if unable:
        facts["without"] = [_attempt(folder, made) for made in (device, *([] if unable.left_out else [""]))]
    with stand_ins(unable.package if unable else ""):
        for trained in CLASSES[folder]:
            _compare(folder, device, trained, facts)
    return facts


def _compare(folder: str, device: str, trained: str, facts: dict[str, Any]) -> None:
    generated, hooked = side(folder, device), side(folder)
    theirs = model(generated, folder, trained)
    ours = model(hooked, folder, trained, theirs.state_dict())
    given = inputs(folder, trained)
    for (name, one), (_, other) in zip(
        calls(theirs, generated, given), calls(ours, hooked, given), strict=True
    ):
        facts["calls"][f"{trained}/{name}"] = {
            "loss": _loss(one),
            "failed": one if isinstance(one, str) else "",
            "gradients": _gradients(one),
            "differences": differences(one, other),
        }
    for row in veomni_hook.explain(ours).rows:
        facts["rows"].append([row.kind, row.op, row.backend, sum(each.times for each in row.training)])


def _loss(numbers: Any) -> float | None:
    loss = None if isinstance(numbers, str) else numbers.get("loss")
    return None if loss is None else loss.item()


def _gradients(numbers: Any) -> int:
    names = [] if isinstance(numbers, str) else [name for name in numbers if name.startswith("grad of ")]
    return sum(numbers[name] is not None for name in names)


def _attempt(folder: str, device: str) -> str:
    """What fails without stand-ins."""
    try:
        module = side(folder, device)
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    made = model(module, folder, linear="eager")
    _, numbers = next(calls(made, module, inputs(folder, CLASSES[folder][0])))
    return numbers if isinstance(numbers, str) else ""


def main() -> None:
    torch.set_num_threads(1)
    device, *folders = sys.argv[1:]
    for folder in folders:
        if (folder, device) not in UNABLE:
            side(folder)
    prepare()
    found: dict[str, Any] = {}
    for folder in folders:
        try:
            found[folder] = compared(folder, device)
        except Exception:
            found[folder] = {"broken": traceback.format_exc()}
    outcomes = veomni_hook.activate(enabled=False).status().modules
    reports = {name: outcome.to_dict() for name, outcome in outcomes.items()}
    print(json.dumps({"found": found, "reports": reports}))


if __name__ == "__main__":
    main()
