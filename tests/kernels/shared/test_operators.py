"""Operators of kernels: called directly, unless something watches."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from veomni_hook.kernels.shared.operators import operator, schema_of

CALLS: list[str] = []


def _doubled(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("implementation")
    return x * 2


def _fake(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("fake")
    return torch.empty_like(x)


doubled = operator(_fake, "test_doubled(Tensor x) -> Tensor")(_doubled)


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


def _shifted_back(
    x: torch.Tensor, sizes: list[int], far: int | torch.SymInt, scale: float | None, keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError


def _unknown(x: torch.Tensor, table: dict[str, int]) -> torch.Tensor:
    raise NotImplementedError


def test_a_function_is_its_schema():
    """Without its parameters that have a default."""
    schema = "shifted_back(Tensor x, int[] sizes, SymInt far, float? scale) -> (Tensor, Tensor)"
    assert schema_of(_shifted_back) == schema
    with pytest.raises(
        TypeError, match=r"_unknown: an operator takes and returns no .*dict.*; write its schema"
    ):
        schema_of(_unknown)


def test_the_operator_is_one_of_torchs():
    assert torch.equal(torch.ops.veomni_hook.test_doubled(torch.ones(2)), torch.full((2,), 2.0))
    torch.library.opcheck(torch.ops.veomni_hook.test_doubled.default, (torch.ones(2),))


def test_nobody_watches():
    CALLS.clear()
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
    assert CALLS == ["implementation"]


def test_who_watches_operators_sees_it():
    with Watching() as mode:
        doubled(torch.ones(2))
    assert "veomni_hook::test_doubled" in mode.seen


def test_fake_tensors_run_no_kernel():
    CALLS.clear()
    with FakeTensorMode():
        assert doubled(torch.ones(2)).shape == (2,)
    assert CALLS == ["fake"]


def test_a_graph_holds_the_operator():
    graphs = []

    def keep(module, inputs):
        graphs.append(module.code)
        return module.forward

    assert torch.equal(
        torch.compile(doubled, backend=keep, fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0)
    )
    assert "veomni_hook.test_doubled" in graphs[0]
