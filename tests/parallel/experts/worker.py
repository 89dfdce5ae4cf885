"""One rank of a `crew.Crew`: runs the functions of `cases` that it is told to, one line of JSON each."""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import veomni_hook.install  # noqa: F401 - in front of transformers, as in a script
from tests.parallel.experts.crew import ANSWER


def answer(**what: object) -> None:
    print(ANSWER + json.dumps(what), flush=True)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    from tests.parallel.experts import cases, setting_cases, training_cases

    def case(name: str) -> Any:
        return next(
            getattr(home, name) for home in (cases, setting_cases, training_cases) if hasattr(home, name)
        )

    answer(started=True)
    for line in sys.stdin:
        order = json.loads(line)
        # Where a rank waits when the crew gives up.
        faulthandler.dump_traceback_later(55)
        try:
            answer(returned=case(order["case"])(folder, **order["arguments"]))
        except Exception:
            answer(failed=traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
