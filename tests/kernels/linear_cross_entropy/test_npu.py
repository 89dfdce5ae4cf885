"""The npu kernels on the double of torch_npu's operators, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.linear_cross_entropy.objectives import OBJECTIVES, TOKENS, loss_of, operands, tokens_of
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.linear_cross_entropy import npu as kernels
from veomni_hook.kernels.linear_cross_entropy import reference, rowwise
from veomni_hook.kernels.linear_cross_entropy import torch as chunked
from veomni_hook.kernels.linear_cross_entropy.objective import NOTHING, Objective, Wanted
from veomni_hook.kernels.selection.registry import registry

pytestmark = pytest.mark.usefixtures("operators")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Losses that torch_npu's operator computes; statistics but for the entropy are by the way.
PLAIN = {"plain", "num_items", "ignore_index", "loss_weights", "weights, num_items", "float32"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several chunks, and several slices of each."""
    monkeypatch.setattr(chunked, "CHUNK_ROWS", 4)
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 1)
    monkeypatch.setattr(rowwise, "SLICE_LOGITS", 300)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", [NOTHING, Wanted(True, True, True)], ids=["loss", "all"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_equals_the_reference(name, wanted, dtype, called):
    given, target = operands(dtype)
    objective = OBJECTIVES[name]("cpu")
    assert_matches(
        loss_of(kernels, target, objective, wanted), loss_of(reference, target, objective, wanted), given
    )
    assert bool(called) is (name in PLAIN and not wanted.entropy)
    assert set(called) <= {"npu_cross_entropy_loss", "npu_cross_entropy_loss_backward"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_tokens_equal_the_reference(wanted, dtype):
    given, target = operands(dtype)
    sides = [
        tokens_of(module, target, Objective(), Wanted(*wanted, False)) for module in (kernels, reference)
    ]
    assert_matches(*sides, given, tolerance=TOKENS[dtype])


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3]
)
def test_gradients_only_where_wanted(wanted, called):
    given, target = operands(torch.float32)
    sides = [loss_of(module, target, Objective(), NOTHING) for module in (kernels, reference)]
    assert_matches(*sides, given, wanted)
    assert ("npu_cross_entropy_loss_backward" in called) is any(wanted)


def test_predictions_are_the_first_of_the_highest():
    (x, weight, bias), target = operands(torch.float32)
    weight[7] *= 4
    weight[130], bias[130] = weight[7], bias[7]
    wanted = Wanted(False, False, True)
    found, truth = (
        module.loss_and_statistics(x, weight, bias, target, Objective(), wanted)[1].predictions
        for module in (kernels, reference)
    )
    assert torch.equal(found, truth) and (found == 7).any()


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows):
    given, target = operands(torch.float32, rows=rows)
    sides = [loss_of(module, target, Objective(num_items=3), NOTHING) for module in (kernels, reference)]
    assert_matches(*sides, given)


def test_every_row_is_ignored():
    given, target = operands(torch.float32)
    target = torch.full_like(target, -100)
    assert_matches(*(loss_of(m, target, Objective(), NOTHING) for m in (kernels, reference)), given)


def test_where_rows_to_ignore_are_not_left_out(monkeypatch):
    """As on a device, where their number would have to be waited for."""
    monkeypatch.setattr(
        chunked._Selected, "of", classmethod(lambda cls, x, target, form, vocab: cls(x, target, None))
    )
    given, target = operands(torch.float32)
    assert_matches(*(loss_of(m, target, Objective(), NOTHING) for m in (kernels, reference)), given)


@pytest.mark.slow
def test_is_traced_without_a_graph_break():
    given, target = operands(torch.float32)
    torch.compiler.reset()
    ours = torch.compile(loss_of(kernels, target, Objective(), NOTHING), backend="aot_eager", fullgraph=True)
    assert_matches(ours, loss_of(reference, target, Objective(), NOTHING), given)


def test_the_operators_keep_their_contracts():
    logits, target = torch.randn(4, 9), torch.randint(9, (4,))
    ops = torch.ops.veomni_hook
    torch.library.opcheck(ops.npu_cross_entropy.default, (logits, target))
    log_probs = ops.npu_cross_entropy(logits, target)[1]
    torch.library.opcheck(ops.npu_cross_entropy_backward.default, (torch.rand(4), log_probs, target))


def test_unable():
    (x, weight, _), _ = operands(torch.float32)
    assert kernels.unable(x, weight, Objective(), NOTHING) is None
    assert "float64" in kernels.unable(x.double(), weight.double(), Objective(), NOTHING)
    assert "empty" in kernels.unable(x, weight[:0], Objective(), NOTHING)


def test_every_variant_is_declared():
    found = {k.variant for k in registry.kernels("linear_cross_entropy") if k.backend == "npu"}
    assert found == {"next_token", "last_token"}
