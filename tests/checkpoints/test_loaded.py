from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from veomni_hook.checkpoints import CheckpointError, allow_incomplete_experts, check_loaded, check_names


def names(*, layers=2, experts=4):
    roles = ("gate_proj", "up_proj", "down_proj")
    return [
        f"model.layers.{layer}.mlp.experts.{e}.{role}.weight"
        for layer in range(layers)
        for e in range(experts)
        for role in roles
    ]


def test_names_without_a_gap():
    check_names([*names(), "lm_head.weight", "model.layers.0.mlp.experts.down_proj_bias"])
    check_names([])
    check_names([f"{name}_scale_inv" for name in names()] + names())


ROLES = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("expert", "roles"),
    [(0, ROLES), (2, ROLES), (4, ("up_proj",))],
    ids=["first", "inner", "a projection of the last"],
)
def test_what_is_missing_though_the_number_may_be_right(expert, roles):
    # transformers would stack experts 0, 1, 3, 4 as 0, 1, 2, 3.
    module = f"model.layers.1.mlp.experts.{expert}"
    gone = {f"{module}.{role}" for role in roles}
    found = [name for name in names(experts=5) if name.removesuffix(".weight") not in gone]
    with pytest.raises(CheckpointError, match=f"{module}.up_proj is missing") as caught:
        check_names(found)
    assert set(caught.value.tensors) == gone


def test_layers_that_the_model_ignores():
    given = [*names(), "model.layers.61.mlp.experts.7.up_proj.weight"]
    with pytest.raises(CheckpointError, match="and 4 more"):
        check_names([*given, "model.layers.61.mlp.experts.12.down_proj.weight"])
    check_names(given, SimpleNamespace(_keys_to_ignore_on_load_unexpected=[r"model\.layers\.61.*"]))


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(4, 6, 8))


class ParallelExperts(torch.nn.Linear):
    pass


class Model(torch.nn.Module):
    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": Experts()})})
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
        self.input_linear = ParallelExperts(2, 2)
        self.head = torch.nn.Linear(2, 2)


def report(**found):
    return {"missing_keys": set(), "mismatched_keys": set(), "unexpected_keys": set()} | found


FUSED = "model.layers.0.mlp.experts.gate_up_proj"
SINGLE = "model.layers.0.mlp.experts.0.gate_proj.weight"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"missing_keys": {FUSED}}, f"{FUSED} is missing"),
        ({"missing_keys": {"input_linear.weight"}}, "input_linear.weight is missing"),
        (
            {"mismatched_keys": {(FUSED, torch.Size([3, 6, 8]), torch.Size([4, 6, 8]))}},
            f"{FUSED} has the shape [3, 6, 8] where the model has [4, 6, 8]",
        ),
        ({"unexpected_keys": {SINGLE}}, f"{SINGLE} is unexpected"),
        ({"unexpected_keys": {SINGLE.removeprefix("model.")}}, "is unexpected"),
        # Names that nothing converted: the layer is the model's, its block has another name.
        ({"unexpected_keys": {SINGLE.replace("mlp", "block_sparse_moe")}}, "is unexpected"),
    ],
)
@pytest.mark.parametrize("kind", [dict, lambda d: SimpleNamespace(**d)])
def test_experts_that_were_not_loaded(found, says, kind):
    with pytest.raises(CheckpointError) as caught:
        check_loaded(Model(), kind(report(**found)))
    assert says in str(caught.value)
    assert len(caught.value.tensors) == 1
    assert "loaded into Model" in caught.value.where
    with allow_incomplete_experts():
        check_loaded(Model(), kind(report(**found)))


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"missing_keys": {"head.weight"}, "mismatched_keys": {("head.weight", (1,), (2,))}},
        {"unexpected_keys": {"other.weight", "model.layers.0.mlp.shared_experts.up_proj.weight"}},
        {"unexpected_keys": {SINGLE.replace("layers.0", "layers.1")}},
        {"unexpected_keys": {f"talker.{SINGLE}", SINGLE.replace("model.", "mtp.")}},
    ],
)
def test_what_is_left_to_transformers_warnings(found):
    check_loaded(Model(), report(**found))


def test_a_base_model_whose_checkpoint_has_the_prefix():
    inner = Model().model
    inner.base_model_prefix = "model"
    with pytest.raises(CheckpointError):
        check_loaded(inner, report(unexpected_keys={SINGLE}))


def test_allowing_ends_with_the_block_and_stays_in_its_thread():
    gap, caught = ["m.experts.1.up_proj.weight"], []

    def elsewhere() -> None:
        try:
            check_names(gap)
        except CheckpointError as error:
            caught.append(error)

    with pytest.raises(ZeroDivisionError), allow_incomplete_experts():
        check_names(gap)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert len(caught) == 1
    with pytest.raises(CheckpointError):
        check_names(gap)
