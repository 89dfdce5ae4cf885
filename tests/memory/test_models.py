"""Small models with each part of the setting ``memory``, in unchanged scripts."""

import pytest

from tests.memory.facts_of_models import BFLOAT16, CHECKPOINTED, MODELS, PACKED
from tests.once import once
from tests.processes import facts, started

SETTINGS = ["checkpoint,offload", "checkpoint,offload,tiles"]
MORE = ["checkpoint", "tiles", "tiles=7"]
MLPS = {
    "llama": {"LlamaMLP"},
    "gemma2": {"Gemma2MLP"},
    "gemma3": {"Gemma3MLP", "SiglipMLP"},
    "llava": {"LlamaMLP", "CLIPMLP"},
    "qwen3_vl": {"Qwen3VLTextMLP", "Qwen3VLVisionMLP"},
}


def trained(factory, setting, *arguments):
    def make():
        return facts(started("-m", "tests.memory.facts_of_models", *arguments, VEOMNI_MEMORY=setting))

    return once(factory, "-".join(("memory", setting, *arguments)), make)


@pytest.mark.parametrize("setting", [*SETTINGS, *(pytest.param(s, marks=pytest.mark.slow) for s in MORE)])
def test_losses_and_gradients_are_those_without_it(tmp_path_factory, setting):
    # A checkpoint may add gradients in another order: the same bits are those of upstream's checkpoints.
    plain = trained(tmp_path_factory, "", *((CHECKPOINTED,) if "checkpoint" in setting else ()))
    saving = trained(tmp_path_factory, setting)
    for name in MODELS:
        expected, found = plain[name], saving[name]
        assert not found["leaf"], name
        assert (found["checkpointed"] > 0) is ("checkpoint" in setting or PACKED in name), name
        if "tiles" in setting:
            close = 5e-3 if BFLOAT16 in name else 1e-6
            assert found["losses"] == pytest.approx(expected["losses"], rel=close), name
            assert found["norms"] == pytest.approx(expected["norms"], rel=10 * close, abs=1e-7), name
        else:
            assert found["losses"] == expected["losses"], name
            assert found["digest"] == expected["digest"], name
        assert found["parts"].keys() == parts_of(name, setting), name
        assert (found["blocks"] > 0) is ("offload" in setting), name
        assert found["left"] == 0, name


def parts_of(name, setting):
    """What of a model runs in parts: attention in layers that the setting checkpoints, and wide MLPs."""
    if "tiles" not in setting:
        return set()
    heads = "checkpoint" in setting and name != "gpt2"
    return ({"heads"} if heads else set()) | MLPS.get(name.partition(" ")[0], set())


PROCESSES = {
    ("llama", ""): ["LlamaMLP", "heads"],
    ("qwen3_moe", ""): ["heads"],
    # All heads at a time, where processes share them.
    ("llama", "sp=2"): ["LlamaMLP"],
    ("ring", "sp=2"): ["LlamaMLP", "ring"],
    ("qwen3_vl", "sp=2"): ["Qwen3VLTextMLP", "Qwen3VLVisionMLP"],
}


@pytest.mark.parametrize(
    ("setting", "parallel"),
    [
        ("offload,tiles=8", ""),
        ("offload,tiles=8", "sp=2"),
        *(pytest.param("tiles=8", parallel, marks=pytest.mark.slow) for parallel in ("", "sp=2")),
    ],
)
def test_with_ddp_and_fsdp2(setting, parallel):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    variables = {"VEOMNI_MEMORY": setting, "VEOMNI_PARALLEL": parallel}
    told = facts(started(*command, "-m", "tests.memory.facts_of_processes", **variables))
    offload = "offload" in setting
    cases = {
        f"{name} with {kind}": parts
        for (name, sizes), parts in PROCESSES.items()
        if sizes == parallel
        for kind in ("DDP", "FSDP2")
    }
    assert told["found"].keys() == cases.keys()
    for case, found in told["found"].items():
        assert found["off"] < 1e-6, case
        assert (found["checkpointed"] > 0) is (found["blocks"] > 0) is offload, case
        assert found["parts"] == [part for part in cases[case] if offload or part != "heads"], case
    if not parallel:
        # Each process chooses by its own batch; gradients are averaged as if both had chosen the same.
        long, short = told["budget"]
        assert (long["checkpointed"], short["checkpointed"]) == (4, 0)
        assert max(long["off"], short["off"]) < 1e-6
