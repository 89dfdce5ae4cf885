"""The recipes of every day, in one start of two processes: without kernels and with them."""

import re

import pytest

from tests.recipes import tiny
from tests.recipes.running import TORCHRUN, drive, said_of

# Trainer last: what accelerate sets up stays.
RECIPES = ["plain_loop", "torchrun_ddp", "torchrun_fsdp2", "trainer"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    model = tiny.dense(tmp_path_factory.mktemp("model"))
    return drive(tmp_path_factory.mktemp("run"), model, *RECIPES, choices="eager,torch", launcher=TORCHRUN)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_kernels_run_and_give_the_losses_of_upstreams_code(found, recipe):
    ((without,), (with_them,)) = found[recipe]["eager"], found[recipe]["torch"]
    assert len(without["losses"]) == 8
    assert with_them["losses"] == pytest.approx(without["losses"], abs=1e-4)
    assert with_them.get("evaluated") == pytest.approx(without.get("evaluated"), abs=1e-4)
    said = said_of(with_them["explanation"])
    assert set(said) == {
        "rms_norm", "add_rms_norm", "rotary", "qk_norm_rotary", "gated_mlp", "linear_cross_entropy"
    }  # fmt: skip
    (of_the_loss,) = said.pop("linear_cross_entropy")
    assert re.search(r"torch \(chosen(, torch \(bound\)\),|\)) 8 calls", of_the_loss), of_the_loss
    assert [line for lines in said.values() for line in lines if not line.startswith("torch (")] == []
