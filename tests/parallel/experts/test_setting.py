"""``VEOMNI_PARALLEL="ep=2"`` in scripts that do not name it."""

import pytest

from tests.parallel.experts.test_models import CLOSE
from tests.parallel.ranks import DIVIDED
from veomni_hook.patches import expert_release

pytestmark = DIVIDED


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "both"),
    [
        *((family, False) for family in ("Qwen3Moe", "GptOss", "DeepseekV3")),
        *(pytest.param(family, True, marks=pytest.mark.slow) for family in ("Qwen3Moe", "GptOss")),
    ],
)
def test_a_script_that_loads_as_always_gets_experts_on_two_ranks(told, told_both, family, both):
    """And shares sequences where the setting says so, too."""
    for answer in (told_both if both else told).run("setting_cases:from_pretrained", family=family):
        assert answer["count"] == 2
        if expert_release.dispatches():
            assert answer["config"] == ([4, 2, "veomni"] if both else [2, 2, "veomni"])
        assert answer["loss"] < CLOSE
        assert answer["gradient"] < CLOSE
        assert "ep=2: each of 2 processes holds 4 experts of" in answer["explained"]
        assert ("sp=2: with gradients" in answer["explained"]) is both


@pytest.mark.usefixtures("divided_by_transformers")
def test_parts_of_stacked_weights_are_turned_as_whole_ones_are(told):
    assert told.run("setting_cases:turned") == [[[2, 3, 5], [2, 3, 5]]] * 2


@pytest.mark.usefixtures("divided_by_transformers")
def test_a_scripts_own_config_wins(told):
    for answer in told.run("setting_cases:explicit"):
        own = {"own": [2, 2, "auto"], "named": [2, 2, "veomni"]}
        assert answer == own | {"fsdp": [2, 1, "auto"], "whole": [1, 1, "auto"]}


@pytest.mark.slow
@pytest.mark.usefixtures("divided_by_transformers")
def test_a_script_may_replicate_divided_models(crew):
    for answer in crew(4, "ep=2").run("setting_cases:replicated"):
        assert answer["loss"] < CLOSE and answer["gradient"] < CLOSE
        assert sorted(answer["meshes"]) == [["dp_replicate", "efsdp", "ep"], ["dp_replicate", "fsdp"]]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("of", "said"),
    [
        ("an odd number of experts", "has 7 experts, which ep=2 does not divide"),
        ("no experts", "Qwen3ForCausalLM: it has no experts"),
        ("identity experts", "LongcatFlashExperts: experts without weights are numbered after those with"),
        ("three ranks", "ep=3 does not divide the 2 processes of this job"),
        ("an old release", "ep=2 needs transformers 5.9 or newer; this is 5.8rc1"),
        ("offload", "does not support CPU offload"),
        ("Dbrx", "DbrxExperts: their "),
        ("JetMoe", "JetMoeParallelExperts: its projections are separate modules"),
        ("NllbMoe", "NllbMoeExperts: "),
        ("SwitchTransformers", "SwitchTransformersExperts: each expert is a module of its own"),
    ],
)
def test_what_cannot_be_divided_is_one_error(told, of, said):
    for answer in told.run("setting_cases:refusal", of=of):
        assert said in answer
        assert "VEOMNI_PARALLEL" in answer
        assert "fix:" in answer


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["alone", "copied", pytest.param("compiled", marks=pytest.mark.slow)])
def test_replicas_that_nobody_synchronises_are_an_error(told, how):
    """They have been built from a config: each process would train its own."""
    for answer in told.run("setting_cases:whole_experts", how=how):
        assert (
            "ep=2 does not divide the experts of Qwen3MoeModel: it was built from a config" in answer["error"]
        )
        assert "load it with from_pretrained" in answer["error"] and "VEOMNI_PARALLEL" in answer["error"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["DDP", "FSDP2", "FSDP2 around it", "DeepSpeed"])
def test_replicas_that_the_script_synchronises_are_one_warning(told, how):
    for answer in told.run("setting_cases:whole_experts", how=how):
        assert answer["loss"] and not answer["error"]
        (said,) = answer["said"]
        assert "ep=2 does not divide the experts of Qwen3MoeModel" in said and "from_pretrained" in said


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["frozen", "in evaluation", "dense", "loaded whole"])
def test_models_that_the_setting_does_not_concern_run_as_without_it(told, how, request):
    if how == "loaded whole":
        request.getfixturevalue("divided_by_transformers")
    for answer in told.run("setting_cases:whole_experts", how=how):
        assert answer["loss"] and not answer["error"] and not answer["said"]


@pytest.mark.usefixtures("divided_by_transformers")
def test_plans_come_from_the_code_of_experts(told):
    for answer in told.run("setting_cases:dropped_plan"):
        assert answer == {"Qwen3Moe": True, "GptOss": True, "DeepseekV3": True}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_saves_and_resumes(told, checkpointing):
    for answer in told.run("setting_cases:trainer", checkpointing=checkpointing):
        assert answer["saved"] == answer["best"] == 0.0
        assert answer["resumed"] < CLOSE


def test_trainer_resumes_what_one_process_saved(told):
    for answer in told.run("setting_cases:resumed_from_one_process"):
        assert answer["far"] < CLOSE
        assert answer["groups"] > 2 and not any(answer["rates"])  # the schedule has come to its end
        *other, missing = answer["refused"]
        assert all("has other groups or parameters" in text for text in other) and len(other) == 2
        assert "but not its states" in missing


@pytest.mark.slow
def test_accelerate_does_not_wrap_what_is_divided(told):
    for answer in told.run("setting_cases:accelerated"):
        assert answer["norms"] < CLOSE
        assert answer["parameters"] < 1e-4
