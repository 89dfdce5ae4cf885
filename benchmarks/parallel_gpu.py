"""Sequence and expert parallelism on two GPUs, or more: `python -m benchmarks.parallel_gpu PART...`.

    python -m benchmarks.parallel_gpu link sequences   # 8k to 128k tokens; about 5 minutes on two H200s
    python -m benchmarks.parallel_gpu experts          # 4k to 64k tokens a GPU; transformers 5.23 or newer
    python -m benchmarks.parallel_gpu whole            # Qwen3-8B with all its layers at 128k tokens
    python -m benchmarks.parallel_gpu longest --gpus 4 --lengths 2097152
    python -m benchmarks.parallel_gpu hang             # how jobs end whose processes fail: some minutes

Parts:

    link        bytes a second that leave a GPU: all-to-all, all-gather.
    sequences   Qwen3-8B's shapes with a few layers, FSDP2, flash attention, our kernels on all sides.
                ``sp1``: each GPU trains a sequence of its own; ``sp``: all share each of as many sequences,
                so a GPU has as many tokens; ``ring``: torch's context parallelism as accelerate 1.15 uses it.
    batches     microseconds in which the host starts to compare three tensors of a call between two
                processes, and waits where nothing runs in between; both may have one GPU.
    memory      a sequence that all GPUs share. ``sp``: with ``memory="checkpoint,offload,tiles"``, and
                ``sp-kept`` without; ``alst``: DeepSpeed's Ulysses and tiled MLP with transformers'
                checkpoints; ``ring``, also with these checkpoints.
    longest     whether a step of a sequence fits into 80 GB a GPU: Qwen3-8B with a few of its layers and an
                allocation for the others', as `longest_gpu` on one. Minutes a step.
    whole       Qwen3-8B with 36 layers, ``memory="checkpoint,offload,tiles"`` and AdamW at 128k tokens:
                tokens a second, memory.
    experts     Qwen3-30B-A3B's shapes with a few layers. ``fsdp``: FSDP2 alone; ``ep``: experts divided, a
                token sent once to a GPU; ``all_to_all``: transformers' dispatch; our kernels on all three.
                ``liger``: FSDP2 alone, upstream's grouped_mm and Liger, in a job before the others.
    hang        one process raises an error, or is killed, in a layer of the third step, under ``sp=2`` and
                ``ep=2``: seconds until the job has ended, and what its processes said last.

Sides of a size take turns in one job. A rate is tokens of a GPU in a second, from the median step; memory is
the peak of a GPU, with weights and gradients. A side that fails or does not fit is recorded with its reason.
``--device cpu`` runs small sizes on gloo, to see that the script works.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks._record import RESULTS

PARTS = ("link", "sequences", "batches", "memory", "longest", "whole", "experts", "hang")
TARGET = "parallel_gpu-cuda.json"
_WORKER = "benchmarks._parallel_worker"
#: So many seconds after a process has failed its job has ended, and so many after its start it is ended.
PROMISED, LIMIT = 60, 300


def main() -> None:
    """Run the parts one after the other, and record each as soon as it is measured."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=2, help="of the parts but `hang`")
    parser.add_argument("--lengths", help="tokens of a sequence, or of a GPU; by default those above")
    parser.add_argument("--sides", help="some of a part's sides, with commas")
    options = parser.parse_args()
    late = False
    for part in options.parts:
        if part == "hang":
            cases = [(setting, how) for setting in ("sp=2", "ep=2") for how in ("raise", "kill")]
            rows = [hang(setting, how, options.device) for setting, how in cases]
            late = any(row["seconds"] > PROMISED for row in rows)
        else:
            jobs = ["upstream", "hook"] if part == "experts" and find_spec("liger_kernel") else ["hook"]
            rows = [row for job in jobs for row in run(part, job, options)]
        if options.device == "cuda":
            record(part if options.gpus == 2 else f"{part}: {options.gpus} GPUs", rows)
    if late:
        sys.exit(f"hang: a job went on for more than {PROMISED} s after a process had failed")


def run(part: str, job: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a part on two processes; return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [
            "--nproc_per_node",
            str(options.gpus),
            "-m",
            _WORKER,
            part,
            job,
            str(output),
            "--device",
            options.device,
        ]
        command += ["--layers", str(options.layers)]
        for name in ("lengths", "sides"):
            if value := getattr(options, name):
                command += [f"--{name}", value]
        environment = os.environ | {"VEOMNI_BANNER": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        done = subprocess.run(command, env=environment, check=False)
        if not output.exists():
            sys.exit(f"{part}: the job ended with {done.returncode} and measured nothing")
        rows: list[dict[str, Any]] = json.loads(output.read_text())
        return rows


def hang(setting: str, how: str, device: str) -> dict[str, Any]:
    """Run a job one of whose processes fails; return when and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        failed = Path(folder) / "failed"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command += ["-m", "benchmarks._hang_worker", setting, how, str(failed), "--device", device]
        with subprocess.Popen(
            command,
            env=os.environ | {"VEOMNI_BANNER": "0"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as job:
            try:
                _, errors = job.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                _, errors = job.communicate()
        ended = time.time()
        if not failed.exists():
            sys.exit(f"{setting}, {how}: no process has failed as it should\n{errors[-4000:]}")
        row = {"setting": setting, "how": how, "status": job.returncode}
        row["seconds"] = round(ended - float(failed.read_text()), 1)
    # torch writes the rank in front of each line of a traceback, and torchrun who was first.
    said = re.findall(r"^\[rank(\d+)\]: (?:\w+\.)*(\w+: .*)", errors, re.MULTILINE)
    row |= {f"rank {rank}": message[:200] for rank, message in said}
    first = re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", errors, re.DOTALL)
    row["first"] = f"rank {first[1]}, exit status {first[2]}" if first else "not said"
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def record(part: str, rows: list[dict[str, Any]]) -> None:
    """Write a part's rows to `results/`; other parts stay, with the date of their run."""
    from veomni_hook.tools.bench.record import circumstances, write

    target = RESULTS / TARGET
    held = json.loads(target.read_text())["parts"] if target.exists() else {}
    facts = circumstances("parallel_gpu", "cuda", parts=held)
    held[part] = {"date": facts["date"], "command": facts["command"], "rows": rows}
    write(facts, target)
    print(f"written: {TARGET}", flush=True)


if __name__ == "__main__":
    main()
