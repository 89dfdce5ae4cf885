"""One rank of a `crew.Crew`: runs the functions of `cases` that it is told to, one line of JSON each."""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import veomni_hook.install  # noqa: F401 - in front of transformers, as in a script


def answer(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    from tests.parallel.experts import cases

    answer(started=True)
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer(returned=getattr(cases, told["case"])(folder, **told["arguments"]))
        except Exception:
            answer(failed=traceback.format_exc())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
