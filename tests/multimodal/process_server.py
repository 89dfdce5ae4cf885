"""Imports torch and what transformers needs besides, then forks a process for each module of facts.

Orders come as lines of JSON, ``{"module", "arguments", "environment", "log"}``; the answer is the exit status.
A process prints to ``log.out`` and ``log.err``. Nothing that the hook patches is imported here: the process decides
on the hook first.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
from typing import Any

for name in (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "huggingface_hub",
    "safetensors.torch", "tokenizers",
):  # fmt: skip
    importlib.import_module(name)


def process(order: dict[str, Any]) -> None:
    """Run the module as ``python -m`` would."""
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{order['log']}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = [order["module"], *order["arguments"]]
    status = 1
    try:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Answer orders until the client is gone."""
    held = {name.partition(".")[0] for name in sys.modules} & {
        "accelerate",
        "peft",
        "transformers",
        "veomni_hook",
    }
    assert not held, held
    for line in sys.stdin:
        if not (child := os.fork()):
            process(json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)


if __name__ == "__main__":
    main()
