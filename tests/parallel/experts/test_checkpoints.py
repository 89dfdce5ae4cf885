"""Checkpoints of transformers' Trainer: saved by one kind of job, resumed by another."""

import pytest

from tests.parallel.experts import models
from tests.parallel.ranks import DIVIDED
from veomni_hook.kernels.selection.process_choice import STATE

pytestmark = DIVIDED
CLOSE = 1e-5

#: How many processes each kind of job has, and its setting.
KINDS = {
    "plain": (1, ""), "DDP": (2, ""), "FSDP2": (2, ""), "sp=2": (2, "sp=2"), "ep=2": (2, "ep=2"),
    "ep=2 on 4": (4, "ep=2"), "ep=4": (4, "ep=4"),
}  # fmt: skip
#: Between these, checkpoints are transformers' and accelerate's own matter.
UPSTREAM = ("plain", "DDP", "FSDP2")
#: In the default suite.
FAST = [("ep=2", "plain"), ("plain", "ep=2")]


@pytest.fixture(scope="module")
def job(ranks):
    """Run a job; a first one of each kind saves."""
    folder, known = ranks.folder / "checkpoints", {}
    with STATE.restored():
        models.small("GptOss").save_pretrained(folder / "model")

    def run(saved_by, kind=None):
        if (saved_by, kind) not in known:
            size, setting = KINDS[kind or saved_by]
            known[saved_by, kind] = ranks.run(
                "experts.checkpoint_cases:train", size, setting, joined=False, folder=str(folder),
                saved_by=saved_by, kind=kind or saved_by, resumes=kind is not None,
            )  # fmt: skip
        return known[saved_by, kind]

    return run


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        pytest.param(one, other, marks=() if (one, other) in FAST else pytest.mark.slow)
        for one in KINDS
        for other in KINDS
        if one not in UPSTREAM or other not in UPSTREAM
    ],
)
def test_a_checkpoint_is_that_of_one_process(job, saved_by, resumed_by):
    """What ep and sp save and resume; FSDP has a form of its own."""
    first = job(saved_by)
    for answer in job(saved_by, resumed_by):
        if saved_by == "FSDP2":
            assert ("was saved by FSDP" if resumed_by.startswith("ep") else "using PyTorch FSDP") in answer
        elif resumed_by == "FSDP2":
            assert "pytorch_model_fsdp_0" in answer  # upstream misses what only FSDP saves
        else:
            for theirs, own in zip(answer, first[0], strict=True):
                assert theirs == pytest.approx(own, rel=CLOSE)
