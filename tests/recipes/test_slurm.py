"""The recipe for SLURM, and what docs/recipes.md says of srun without torchrun: two hosts on this machine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from scripts.recipes import DOCUMENT, RECIPES
from tests.recipes.running import ROOT, environment, run

SCRIPT = RECIPES / "slurm.sh"
TRAIN = ROOT / "examples" / "parallel" / "plain_loop.py"
#: What srun does with its command: once for each task, and a task that fails ends all.
SRUN = """#!/bin/bash
shift
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=0 "$@" &
done
wait -n && wait -n || { status=$?; kill $(jobs -p); exit $status; }
"""
PROGRAMS = {
    "srun": SRUN,
    "scontrol": "#!/bin/bash\n[ \"$*\" = 'show hostnames here' ] && printf 'localhost\\nelsewhere\\n'\n",
    "torchrun": f'#!/bin/bash\nexec "{sys.executable}" -m torch.distributed.run "$@"\n',
    "python": f'#!/bin/bash\nexec "{sys.executable}" "$@"\n',
}


def without_torchrun() -> str:
    """The recipe with the last command that the document gives for srun alone."""
    (block,) = re.findall(r"^```bash\n(export MASTER_ADDR.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
    head, _, _ = SCRIPT.read_text().partition("srun ")
    return head + block


@pytest.mark.parametrize("text", [SCRIPT.read_text(), without_torchrun()], ids=["torchrun", "srun"])
def test_it_parses(text):
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def is_free(port: int) -> bool:
    with socket.socket() as free:
        return free.connect_ex(("localhost", port)) != 0


@pytest.fixture
def job(tmp_path):
    """Variables of a job on two hosts, each of which has one GPU, and the programs of the cluster."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    number = next(
        number for number in range(os.getpid(), os.getpid() + 10000) if is_free(20000 + number % 10000)
    )
    return environment(
        tmp_path, PATH=f"{programs}:/usr/bin:/bin", SLURM_JOB_ID=str(number), SLURM_JOB_NODELIST="here",
        SLURM_NNODES="2", SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="1", SLURM_GPUS_ON_NODE="1",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("text", [SCRIPT.read_text(), without_torchrun()], ids=["torchrun", "srun"])
def test_two_hosts_share_sequences_and_get_the_losses_of_one_process(job, tmp_path, text):
    (tmp_path / "job.sh").write_text(text)
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    run([sys.executable, str(TRAIN), "--output", "alone"], tmp_path, 300, job | one)
    run(["bash", "job.sh", str(TRAIN), "--output", "hosts"], tmp_path, 300, job | {"VEOMNI_PARALLEL": "sp=2"})
    alone, hosts = (json.loads((tmp_path / name).read_text()) for name in ("alone", "hosts"))
    assert len(alone) == 4 and hosts == pytest.approx(alone, rel=1e-4)
