"""Runs an example as the script of a rank."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from tests.parallel.ranks import ROOT


def losses(join: Callable[[], None], script: str, port: int, folder: str) -> list[float] | None:
    """Return the losses that rank 0 writes. The script joins its group itself, as under torchrun."""
    os.environ["MASTER_PORT"] = str(port)
    output = Path(folder) / f"{os.environ['RANK']}.json"
    path = ROOT / "examples" / "parallel" / script
    sys.argv = [str(path), "--steps", "3", "--output", str(output)]
    runpy.run_path(str(path), run_name="__main__")
    return json.loads(output.read_text()) if output.exists() else None
