"""``python -m tests.proof.spoiled``: the verdicts on one family, each time with something else spoiled, as JSON.

Activating the hook and replacing functions concern the whole process, so the test runs this in one of its own.
"""

from __future__ import annotations

import importlib
import json
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from tests.proof import build, runner
from veomni_hook.kernels.selection.registry import registry

MODULE = "transformers.models.qwen3.modeling_qwen3"


def _raises(*_: Any) -> None:
    raise RuntimeError("spoiled")


def _zeros(built: Any, seed: int = 0) -> Any:
    for tensor in built.parameters():
        tensor.data.zero_()
    return built


def cases(modeling: Any) -> dict[str, list[Any]]:
    """What to replace, by what it means."""
    from veomni_hook.kernels.rms_norm import reference
    from veomni_hook.kernels.slot import Slot

    right = reference.cast_before_weight

    def norm(change: Any) -> list[Any]:
        return [patch.object(reference, "cast_before_weight", lambda *operands: change(right(*operands)))]

    return {
        "nothing": [],
        "another result": norm(lambda result: result * 1.001),
        "another dtype": norm(lambda result: result.double()),
        "no gradient": norm(lambda result: result.detach()),
        "an error": norm(_raises),
        "no guard is taken": [
            patch.object(Slot, "kernel", lambda *_: None),
            patch.object(Slot, "at", lambda self, owner, upstream: upstream),
        ],
        "a class that cannot be built": [patch.object(modeling.Qwen3MLP, "__init__", _raises)],
        "nothing but zeros": [patch.object(build, "randomise", _zeros)],
        "no bound call": [patch.object(modeling, "__file__", modeling.__spec__.loader.upstream)],
    }


def main() -> None:
    """Print ``{case: {op and target: outcome}}``."""
    runner._start()
    modeling = importlib.import_module(MODULE)
    found = {}
    for name, patches in cases(modeling).items():
        registry.version += 1  # slots keep the code of kernels that they have loaded
        with ExitStack() as stack:
            for one in patches:
                stack.enter_context(one)
            found[name] = {f"{v.op} of {v.target}": v.outcome for v in runner.prove_module(MODULE)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
