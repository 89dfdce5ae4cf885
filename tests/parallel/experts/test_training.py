"""Several steps: clipping over meshes, AdamW, checkpoints that move between meshes."""

import pytest

from tests.parallel.ranks import DIVIDED

pytestmark = DIVIDED
CLOSE = 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_five_steps_are_those_of_one_process(crew, family, size):
    for answer in crew(size).run("training_cases:train", family=family, ep=2):
        assert answer["clipped"]
        assert answer["norms"] < CLOSE
        assert answer["parameters"] < 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("size", "ep"), [(2, 2), *(pytest.param(4, ep, marks=pytest.mark.slow) for ep in (2, 4))]
)
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_accumulated_gradients_are_those_of_one_process(crew, family, size, ep, checkpointing):
    """FSDP2 has the weights of experts only where several ranks have the same ones."""
    case = {"family": family, "ep": ep, "checkpointing": checkpointing}
    for answer in crew(size).run("training_cases:accumulate", **case):
        assert answer["gradients"] < CLOSE
        assert answer["norms"] < CLOSE
        assert answer["parameters"] < 1e-4
        assert answer["in units"] == ([] if size == ep else [f"{family}Experts"])
        assert answer["meshes"] == [["ep"] if size == ep else ["efsdp", "ep"]]


@pytest.mark.parametrize(
    ("size", "case", "close"),
    [
        (2, {"mixed": True}, 0.05),
        (2, {"implementation": "all_to_all"}, CLOSE),
        pytest.param(3, {"experts": 6}, CLOSE, marks=pytest.mark.slow),
    ],
    ids=["another dtype", "transformers' dispatch", "no power of two"],
)
def test_fsdp_keeps_experts_that_it_has_work_for(crew, size, case, close, request):
    if "experts" not in case:
        request.getfixturevalue("divided_by_transformers")
    for answer in crew(size).run("training_cases:units", ep=size, **case):
        assert answer["in units"] == ["Qwen3MoeExperts"]
        assert answer["gradients"] < close


@pytest.mark.slow
@pytest.mark.parametrize("power", ["2", pytest.param("1", marks=pytest.mark.slow), "inf"])
def test_the_norm_over_meshes(four, power):
    for answer in four.run("training_cases:clip", ep=2, kind=power):
        assert answer["meshes"] > 1
        assert answer["far"] < CLOSE
        assert answer["after"] == pytest.approx(0.01, rel=1e-3)


def test_a_norm_that_is_not_finite_is_so_on_all_ranks(four):
    for answer in four.run("training_cases:clip", ep=2, kind="nan"):
        assert answer == {"finite": False, "raised": True, "meshes": 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("ep", "other"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_checkpoint_loads_on_another_mesh_and_without_this_package(four, ep, other, distributed, request):
    if distributed:
        request.getfixturevalue("divided_by_transformers")
    for answer in four.run("training_cases:checkpoint", ep=ep, other=other, distributed=distributed):
        assert answer == {"other mesh": 0.0, "one process": 0.0}


@pytest.mark.slow
def test_training_goes_on_on_another_mesh(four):
    for answer in four.run("training_cases:optimizer", ep=2, other=4):
        assert answer["far"] < 1e-4
