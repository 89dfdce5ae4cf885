"""Which position ids are known to be one sequence a row, by how they were made while dynamo traces."""

from __future__ import annotations

import operator

import pytest
import torch

from veomni_hook.kernels.causal_mask.compiled import is_one_sequence
from veomni_hook.kernels.causal_mask.positions import counts_up

LENGTH = 6


def zero_the_third(ids):
    ids[2] = 0


COUNTING = {
    "plain": lambda x, n: torch.arange(n),
    "shifted": lambda x, n: (torch.arange(n, device=x.device) + 3).unsqueeze(0).expand(2, -1),
    "shifted from the left": lambda x, n: 3 + torch.arange(n),
    "from a bound": lambda x, n: torch.arange(3, 3 + n, dtype=torch.long)[None, :],
    "named bounds": lambda x, n: torch.arange(start=0, end=n, step=1)[None],
    "reduced": lambda x, n: torch.arange(n).sub(2).view(1, -1),
    "int": lambda x, n: torch.arange(n, dtype=torch.int32).to(x.device).long(),
    "three axes": lambda x, n: torch.arange(n).view(1, 1, -1).expand(4, 2, -1)[0],
    "three axes but one": lambda x, n: torch.arange(n).view(1, 1, -1).expand(4, 2, -1)[1:],
    "a part": lambda x, n: torch.arange(n).unsqueeze(0)[:, 2:],
    "ellipsis": lambda x, n: torch.arange(n).expand(2, -1)[None, ...],
    "repeated rows": lambda x, n: torch.arange(n).unsqueeze(0).repeat(2, 1),
    "embedded": lambda x, n: read(torch.arange(n), lambda ids: torch.nn.functional.embedding(ids, x[0])),
    "compared": lambda x, n: read(torch.arange(n), lambda ids: torch.diff(ids).ne(1).cumsum(-1)),
}
UNKNOWN = {
    "another step": lambda x, n: torch.arange(0, 2 * n, 2),
    "floats": lambda x, n: torch.arange(0.0, n),
    "backwards": lambda x, n: torch.arange(n).flip(0),
    "negated": lambda x, n: 5 - torch.arange(n),
    "multiplied": lambda x, n: torch.arange(n) * 2,
    "modulo": lambda x, n: torch.arange(n) % 3,
    "a column": lambda x, n: torch.arange(n).unsqueeze(-1),
    "an expanded column": lambda x, n: torch.arange(n).unsqueeze(-1).expand(-1, n),
    "repeated in a row": lambda x, n: torch.arange(n).unsqueeze(0).repeat(1, 2),
    "one position": lambda x, n: torch.arange(n)[None, :, None].expand(2, n, n)[:, 0],
    "indexed to the last axis": lambda x, n: torch.arange(n).expand(n, n)[:, 1, ...],
    "every other": lambda x, n: torch.arange(n)[None, ::2],
    "gathered": lambda x, n: torch.arange(n)[torch.arange(n).flip(0)],
    "plus a tensor": lambda x, n: torch.arange(n) + torch.ones(n, dtype=torch.long),
    "plus itself": lambda x, n: operator.add(ids := torch.arange(n), ids),
    "with alpha": lambda x, n: torch.arange(n).add(1, alpha=2),
    "transposed": lambda x, n: torch.arange(n).expand(n, n).t(),
    "cast by another": lambda x, n: torch.arange(n, dtype=torch.int8),
    "bits": lambda x, n: torch.arange(n).view(torch.int32),
    "values of the input": lambda x, n: x[0, :, 0].long(),
    "written": lambda x, n: written(torch.arange(n), lambda ids: ids[3:].zero_()),
    "written by index": lambda x, n: written(torch.arange(n), zero_the_third),
    "written through data": lambda x, n: written(torch.arange(n), lambda ids: ids.data.zero_()),
    "written through a view": lambda x, n: written(torch.arange(n), lambda ids: ids.view(2, -1)[1].sub_(3)),
    "written as an output": lambda x, n: written(torch.arange(n), lambda ids: torch.add(ids, ids, out=ids)),
    "written in place": lambda x, n: operator.iadd(torch.arange(n), torch.arange(n)),
}


def read(ids, reader):
    reader(ids)
    return ids


def written(ids, writer):
    writer(ids)
    return ids.unsqueeze(0)


def known(make, *, dynamic):
    """Whether dynamo is told that the ids are one sequence."""
    torch._dynamo.reset()

    def function(x):
        return x + 1 if is_one_sequence(make(x, x.shape[1])) else x

    x = torch.randn(LENGTH, LENGTH, 4)
    return not torch.equal(torch.compile(function, backend="eager", fullgraph=True, dynamic=dynamic)(x), x)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
def test_one_sequence_a_row(make, dynamic):
    ids = make(torch.randn(LENGTH, LENGTH, 4), LENGTH)
    assert (ids.diff() == 1).all()
    assert known(make, dynamic=dynamic)


@pytest.mark.sample(4)
@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown(make):
    assert not known(make, dynamic=False)


@pytest.mark.parametrize("name", ["an expanded column", "repeated in a row", "indexed to the last axis"])
def test_unknown_by_symbols(name):
    assert not known(UNKNOWN[name], dynamic=True)


def test_an_operator_that_may_write():
    @torch.library.custom_op("veomni_tests::overwrite", mutates_args={"ids"})
    def overwrite(ids: torch.Tensor) -> None:
        ids.zero_()

    assert not known(lambda x, n: read(torch.arange(n), overwrite), dynamic=False)


def test_what_comes_from_outside():
    def function(x, ids):
        return x + 1 if is_one_sequence(ids) else x

    torch._dynamo.reset()
    run = torch.compile(function, backend="eager", fullgraph=True)
    x = torch.randn(2, LENGTH)
    for ids in (torch.arange(LENGTH), torch.arange(LENGTH)[None]):
        assert torch.equal(run(x, ids), x)


def test_inference_mode():
    with torch.inference_mode():
        assert known(COUNTING["shifted"], dynamic=True)


def test_a_graph_without_values_is_unknown():
    graph = torch.fx.Graph()
    node = graph.call_function(torch.arange, (4,))
    assert not counts_up(node)
    node.meta["example_value"] = torch.arange(4)
    assert counts_up(node)
