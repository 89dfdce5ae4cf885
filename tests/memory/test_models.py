"""Small models with each part of the setting ``memory``, in unchanged scripts."""

from __future__ import annotations

import pytest

from tests.memory.facts_of_models import CHECKPOINTED, MODELS
from tests.once import once
from tests.processes import facts, started

SETTINGS = ["checkpoint,offload", "checkpoint,offload,tiles"]
MORE = ["checkpoint", "tiles", "tiles=7"]


def trained(factory, setting, *arguments):
    def make():
        return facts(started("-m", "tests.memory.facts_of_models", *arguments, VEOMNI_MEMORY=setting))

    return once(factory, "-".join(("memory", setting, *arguments)), make)


@pytest.mark.parametrize("setting", [*SETTINGS, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE)])
def test_loss_and_gradients_are_those_without_it(tmp_path_factory, setting):
    # A checkpoint may add gradients in another order: the same bits are those of upstream's checkpoints.
    plain = trained(tmp_path_factory, "", *(() if "tiles" in setting else (CHECKPOINTED,)))
    saving = trained(tmp_path_factory, setting)
    for name in MODELS:
        expected, found = plain[name], saving[name]
        assert not found["leaf"], name
        assert (found["checkpointed"] > 0) is ("checkpoint" in setting), name
        if "tiles" in setting:
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6), name
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5, abs=1e-7), name
        else:
            assert found["loss"] == expected["loss"], name
            assert found["digest"] == expected["digest"], name
    assert (saving["blocks"] > 0) is ("offload" in setting)


@pytest.mark.parametrize("setting", ["offload,tiles=8", pytest.param("tiles=8", marks=pytest.mark.slow)])
def test_with_ddp_and_fsdp2(setting):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    found = facts(started(*command, "-m", "tests.memory.facts_of_processes", VEOMNI_MEMORY=setting))
    assert len(found["off"]) == 4
    assert all(off < 1e-6 for off in found["off"].values()), found
    assert (found["blocks"] > 0) is ("offload" in setting)
