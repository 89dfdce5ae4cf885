"""Imports what ranks need, then forks the ranks of each case that `ranks.Ranks` sends, one line of JSON each."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import veomni_hook.install  # noqa: F401 - in front of transformers, as in a script

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
import torch.distributed.fsdp
import torch.distributed.tensor

from tests.parallel.ranks import FAMILIES
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.parallel import process

for family in FAMILIES:
    if importlib.util.find_spec(f"transformers.models.{family}") is not None:  # a release may lack it
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
for name in ("transformers.trainer", "transformers.distributed", "accelerate", "torch._dynamo"):
    importlib.import_module(name)


def rank(number: int, order: dict[str, Any], folder: Path, meeting: Path) -> None:
    """Be a rank of a case, and write what it returns."""
    log = os.open(folder / f"rank{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Where a rank waits when it is given up.
    faulthandler.dump_traceback_later(order["limit"] - 3)
    variables = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": order["size"]}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "VEOMNI_PARALLEL": order["setting"]}
    process.tell(order["setting"])
    try:
        if order["joined"]:
            join(meeting)
        else:
            order["arguments"]["join"] = lambda: join(meeting)
        if "folder" in order["arguments"]:
            order["arguments"]["folder"] = Path(order["arguments"]["folder"])
        home, _, function = order["case"].partition(":")
        called = getattr(importlib.import_module(f"tests.parallel.{home}"), function)
        answer = {"returned": called(**order["arguments"])}
    except BaseException:
        answer = {"failed": traceback.format_exc()}
    (meeting.parent / f"{number}.tmp").write_text(json.dumps(answer))
    (meeting.parent / f"{number}.tmp").rename(meeting.parent / f"{number}.json")


def join(meeting: Path) -> None:
    """Join the group of all ranks."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )


def run(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fork the ranks and wait for them; the first that fails ends all."""
    with tempfile.TemporaryDirectory() as place:
        meeting, ranks = Path(place) / "meeting", {}
        for number in range(order["size"]):
            if not (child := os.fork()):
                rank(number, order, folder, meeting)
                # Without what libraries do at exit: threads wait for ranks that are gone.
                os._exit(0)
            ranks[child] = number
        answers: dict[int, Any] = {}
        until = time.monotonic() + order["limit"]
        try:
            while ranks:
                child, status = os.waitpid(-1, os.WNOHANG)
                if not child:
                    if time.monotonic() > until:
                        return {"failed": f"more than {order['limit']} s; answered: {sorted(answers)}"}
                    time.sleep(0.005)
                    continue
                number = ranks.pop(child)
                written = Path(place) / f"{number}.json"
                if not written.exists():
                    return {"failed": f"rank {number} ended with status {status}"}
                answer = json.loads(written.read_text())
                if "failed" in answer:
                    return {"failed": f"rank {number}:\n{answer['failed']}"}
                answers[number] = answer["returned"]
        finally:
            for child in ranks:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return {"returned": [answers[number] for number in range(order["size"])]}


def main(folder: Path) -> None:
    """Answer orders until the client is gone."""
    torch.set_num_threads(1)
    set_choice("eager")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), folder)), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
