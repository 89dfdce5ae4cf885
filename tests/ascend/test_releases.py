"""Calls of kernels against the schemas of torch_npu's releases: what is declared to do, does."""

import pytest
import torch
from packaging.version import Version

from tests.ascend.extract import DOUBLED, OPERATORS, RELEASES, schema_of
from tests.ascend.releases import DOCUMENT, Call, calls, fits, supported, written
from veomni_hook.kernels.selection.declaration import NPU
from veomni_hook.kernels.selection.registry import registry
from veomni_hook.kernels.selection.system import System

pytestmark = pytest.mark.usefixtures("operators")


def test_every_operator_is_called_and_every_op_has_a_sample():
    made = calls()
    assert set(made) == set(registry.preset("npu"))
    assert {call.operator for each in made.values() for call in each} == set(OPERATORS)


@pytest.mark.sample(2)
@pytest.mark.parametrize("release", RELEASES)
def test_every_declared_release_takes_all_calls(release):
    assert NPU.unmet(System("npu", distributions={"torch_npu": release})) is None
    assert not any(supported(release).values())


def test_the_first_of_them_is_what_is_declared():
    (requirement,) = NPU.distributions
    assert requirement == f"torch_npu>={min(RELEASES, key=Version)}"
    assert DOUBLED in RELEASES


def test_the_table_is_that_of_the_document():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert written(text) == text, "run python -m tests.ascend.releases"


x = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("call", "schema", "reason"),
    [
        (Call("npu_swiglu", (x,), {"dim": -1}), "npu_swiglu(Tensor self, int dim=-1) -> Tensor", None),
        (Call("npu_swiglu", (x,), {}), None, "no npu_swiglu"),
        (Call("npu_swiglu", (x, -1), {}), "npu_swiglu(Tensor self) -> Tensor", "by position, not 2"),
        (Call("npu_swiglu", (x,), {"dim": 0}), "npu_swiglu(Tensor self) -> Tensor", "takes no dim"),
        (Call("npu_swiglu", (x,), {}), "npu_swiglu(Tensor self, int dim) -> Tensor", "needs dim"),
        (Call("npu_swiglu", (x, 0.5), {}), "npu_swiglu(Tensor self, int dim) -> Tensor", "dim is int, not float"),
        (Call("npu_swiglu", ([x],), {}), "npu_swiglu(Tensor self) -> Tensor", "self is Tensor, not list"),
        (Call("npu_swiglu", (x,), {}), "npu_swiglu(Tensor[] self) -> Tensor", "not Tensor"),
        (Call("npu_swiglu", ([x],), {}), "npu_swiglu(Tensor[] self, Tensor? y=None) -> Tensor", None),
        (Call("npu_swiglu", (x, True), {}), "npu_swiglu(Tensor self, int dim) -> Tensor", "not bool"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(call, schema, reason):
    found = fits(call, schema)
    assert found is None if reason is None else reason in found


def test_a_release_that_lacks_an_operator_would_show(monkeypatch):
    real = schema_of
    monkeypatch.setattr(
        "tests.ascend.releases.schema_of",
        lambda name, release: None if name == "npu_swiglu" else real(name, release),
    )
    found = supported(DOUBLED)
    assert found["gated_mlp"] == ["no npu_swiglu"] and found["moe_experts"] == ["no npu_swiglu"]
    assert not found["rms_norm"]
