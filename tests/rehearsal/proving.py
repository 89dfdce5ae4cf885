"""The proof of modules of a rewritten release, in processes that import it: ``python -m tests.rehearsal.proving``.

Reads the modules from its arguments, and writes a line of JSON for each: its verdicts, and digests of what upstream's
own code got and computed there, by which a rewrite is compared with the original.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.proof import runner

_ROOT = Path(__file__).parents[2]
#: Verdicts of a module by op, target and number; each with its outcome, detail and digests.
Proved = dict[str, dict[str, Any]]


def proved(
    modules: Sequence[str], folder: Path, cache: Path, jobs: int
) -> Iterator[tuple[str, Proved | str]]:
    """Prove modules of the release in ``folder``; yields each as it is done, or the error of its import."""
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {
        "PYTHONPATH": paths, "VEOMNI_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.rehearsal.proving", str(jobs), *modules]
    with subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield from json.loads(line).items()
    if process.returncode:
        raise RuntimeError(f"the proof of {folder} ended with status {process.returncode}")


def _proved(module: str) -> Proved | str:
    from tests.proof import provers
    from tests.proof.compare import Run, run
    from veomni_hook.kernels.selection.process_choice import STATE

    digests: list[tuple[str, str]] = []

    def recorded(call: Any, inputs: Any, *owner: Any) -> Run:
        result = run(call, inputs, *owner)
        if str(STATE.choice) == "eager":
            tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
            # Under whatever names it got them.
            got = "".join(sorted(_digest([value]) for value in tensors))
            digests.append((got, _digest(result.outputs[name] for name in sorted(result.outputs))))
        return result

    try:
        imported = importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    verdicts: Proved = {}
    with patch.object(provers, "run", recorded):
        for site in runner.routed(module):
            key = f"{site.op} {site.target}"
            torch.manual_seed(zlib.crc32(key.encode()))
            digests.clear()
            verdict = runner.judge(site, imported)
            number = sum(each.startswith(key + " ") for each in verdicts)
            verdicts[f"{key} {number}"] = verdict.to_dict() | {"digests": list(digests)}
    return verdicts


def _digest(values: Iterable[torch.Tensor]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for value in values:
        value = value.detach().cpu().contiguous()
        total.update(str((value.dtype, tuple(value.shape))).encode())
        # Both zeros are one value, and so are all NaNs.
        value = (value + 0).nan_to_num(nan=7.0) if value.is_floating_point() else value
        total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _main(jobs: int, modules: Sequence[str]) -> None:
    for module, result in runner.in_processes(_proved, {module: (module,) for module in modules}, jobs):
        if isinstance(result, BaseException):
            raise result
        print(json.dumps({module: result}), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
