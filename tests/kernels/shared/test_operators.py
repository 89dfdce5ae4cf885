"""Operators of kernels: called directly, unless something watches."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.dispatched import Operators
from veomni_hook.kernels.shared import operators
from veomni_hook.kernels.shared.operators import operator, schema_of

CALLS: list[str] = []


def _doubled(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("implementation")
    return x * 2


def _fake(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("fake")
    return torch.empty_like(x)


doubled = operator(_fake, "test_doubled(Tensor x) -> Tensor")(_doubled)


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
    with Operators() as mode:
        doubled(torch.ones(2))
    assert "test_doubled" in mode.names


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


def test_caches_of_compiled_code_are_told_once_which_operators_these_are():
    with FakeTensorMode():
        for _ in range(2):
            doubled(torch.empty(2))
    assert torch.compiler.config.cache_key_tag.count("veomni_hook.kernels") == 1


def test_a_digest_is_that_of_names_and_code(tmp_path):
    digests = []
    names = ("a.py", "1"), ("a.py", "2"), ("b/a.py", "2"), ("c.pyc", "2"), ("__pycache__/a.pyc", "3")
    for name, text in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        digests.append(operators._digest(tmp_path))
    assert len(set(digests[:4])) == 4 and digests[4] == digests[3]


#: Two versions of an operator, of which a program kept what it compiled.
PROGRAM = """
import sys
import torch
from veomni_hook.kernels.shared import operators

size, operators._digest = int(sys.argv[1]), lambda _: sys.argv[2]

@operators.operator(lambda x: x.new_empty(size), "sized(Tensor x) -> Tensor")
def sized(x):
    return x.new_ones(size)

print(torch.compile(lambda x: sized(x * 2) * 2)(torch.ones(4)).shape)
"""


@pytest.mark.slow
def test_compiled_code_of_another_version_is_compiled_anew(tmp_path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", PROGRAM, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout or done.stderr

    assert "Size([4])" in run("4", "one")
    assert "expected size" in run("6", "one")  # else this shows nothing
    assert "Size([6])" in run("6", "another")
