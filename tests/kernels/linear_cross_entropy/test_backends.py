"""Every backend against the reference, in several chunks; padded: with products whose widths are padded by force.

Triton's kernels run in the interpreter on a CPU, torch_npu's operators are doubles.
"""

from itertools import product

import pytest
import torch
from torch.nn import functional

from tests.kernels.linear_cross_entropy.objectives import (
    EVERYTHING,
    OBJECTIVES,
    ROWS,
    TOKENS,
    VOCAB,
    loss_of,
    operands,
    tokens_of,
)
from tests.kernels.matching import DEVICE, assert_matches, gradients
from veomni_hook.kernels.linear_cross_entropy import chunks, npu, reference, rowwise
from veomni_hook.kernels.linear_cross_entropy import torch as chunked
from veomni_hook.kernels.linear_cross_entropy.objective import NOTHING, Objective, Transform, Wanted

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Sizes that cut few rows into chunks, and blocks or slices.
SMALL = {
    chunked: {"CHUNK_ROWS": 4, "CHUNK_LOGITS": 0, "CHUNK_LOGITS_GPU": 0},
    rowwise: {"SLICE_LOGITS": 300},
}
OF_TRITON = {"CHUNK_ROWS": 1, "LEAST_ROWS": 1, "CHUNK_BYTES": 1, "TILE": 8, "BLOCK": 128}
#: Few rows of a weight are copied, so that there are others.
PADDED = {"PADDED_ON": frozenset({"cpu", "cuda"}), "COPIED": 64 * 16, "ROWS_COPIED": 64}
BACKENDS = ["torch", "torch, one chunk", "triton", "npu", "torch, padded", "triton, padded"]


def backend_of(name, request):
    """The module of a backend, set up for small sizes."""
    patch = request.getfixturevalue("monkeypatch")
    sizes = dict(SMALL)
    if name.startswith("triton"):
        pytest.importorskip("triton")
        from veomni_hook.kernels.linear_cross_entropy import triton

        sizes[triton] = OF_TRITON
    if "one chunk" in name:
        sizes = {}
    if "padded" in name:
        sizes[chunks] = PADDED
    for home, values in sizes.items():
        for constant, value in values.items():
            patch.setattr(home, constant, value)
    if name == "npu":
        request.getfixturevalue("operators")
        return npu
    return triton if name.startswith("triton") else chunked


@pytest.fixture(params=BACKENDS)
def backend(request):
    return backend_of(request.param, request)


def of(backend):
    return "cpu" if backend is npu else DEVICE


def matches(backend, given, target, objective=None, wanted=EVERYTHING, **options):
    """Compare the losses of the backend and of the reference."""
    objective = objective or Objective()
    sides = [loss_of(module, target, objective, wanted) for module in (backend, reference)]
    assert_matches(*sides, given, **options)


def tokens_match(backend, given, target, objective=None, wanted=(True, True), **options):
    sides = [
        tokens_of(module, target, objective or Objective(), Wanted(*wanted, False))
        for module in (backend, reference)
    ]
    assert_matches(*sides, given, **options)


@pytest.mark.sample(30)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", [NOTHING, EVERYTHING], ids=["loss", "all"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses(backend, name, wanted, dtype):
    given, target = operands(dtype, of(backend))
    matches(backend, given, target, OBJECTIVES[name](of(backend)), wanted)
    if dtype is torch.float32:
        matches(backend, given[:2], target, OBJECTIVES[name](of(backend)), wanted)


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_tokens(backend, softcap, wanted, dtype):
    given, target = operands(dtype, of(backend))
    objective = Objective(transform=Transform(scale=0.7, softcap=softcap))
    tokens_match(backend, given, target, objective, wanted, tolerance=TOKENS[dtype])


def test_float64():
    given, target = operands(torch.float64)
    for name in ("plain", "all"):
        matches(chunked, given, target, OBJECTIVES[name]("cpu"))


@pytest.mark.sample(10)
@pytest.mark.parametrize("wanted", [*product([True, False], repeat=3)][1:])
def test_gradients_only_where_wanted(backend, wanted):
    given, target = operands(torch.float32, of(backend))
    sides = [loss_of(module, target, Objective(), NOTHING) for module in (backend, reference)]
    assert_matches(*sides, given, wanted)
    sides = [tokens_of(module, target, Objective(), Wanted(True, True)) for module in (backend, reference)]
    assert_matches(*sides, given, wanted)


def test_predictions_are_the_first_of_the_highest(backend):
    (x, weight, bias), target = operands(torch.float32, of(backend))
    weight[7] *= 4
    for other in (130, 135):  # in another lane of a block, and in the same
        weight[other], bias[other] = weight[7], bias[7]
    (x[:3], target[:3]) = (100 * weight[7], 7)
    for make in (lambda *call: backend.loss_and_statistics(*call)[1], backend.token_statistics):
        found = make(x, weight, bias, target, Objective(), Wanted(False, False, True))
        expected = (x @ weight.t() + bias).argmax(-1).where(target != -100, -100)
        assert found[:2] == (None, None) and torch.equal(found.predictions, expected)
        assert found.predictions[0] == 7


@pytest.mark.sample(18)
@pytest.mark.parametrize("ignored", ["none", "all"])
@pytest.mark.parametrize("rows", [0, 1, 11])
@pytest.mark.parametrize("num_items", [None, 4])
def test_few_rows_and_none_that_count(backend, rows, ignored, num_items):
    given, target = operands(torch.float32, of(backend), rows=rows)
    target = target.abs() if ignored == "none" else target.fill_(-100)
    matches(backend, given, target, Objective(num_items=num_items))


def test_strided_operands(backend):
    (x, weight, bias), target = operands(torch.float32, of(backend))
    given = [x.t().contiguous().t(), weight.t().contiguous().t(), bias.repeat_interleave(2)[::2]]
    matches(backend, given, target.repeat_interleave(2)[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(backend, dtype):
    given, target = operands(dtype, of(backend))
    with torch.autocast(of(backend), dtype=torch.bfloat16):
        matches(backend, given, target, wanted=NOTHING, tolerance=2e-2)


def test_float16_keeps_gradients_that_a_loss_scale_makes_visible(backend):
    given, target = operands(torch.float16, of(backend))
    sides = []
    for module in (backend, reference):
        call = loss_of(module, target, Objective(num_items=2_000_000), NOTHING)
        sides.append(lambda *inputs, call=call: call(*inputs)[0] * 2.0**16)
    assert_matches(*sides, given)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_backward_twice_through_a_retained_graph(backend, scale):
    given, target = operands(torch.float32, of(backend))
    leaves = [tensor.requires_grad_() for tensor in given]
    loss = loss_of(backend, target, Objective(), NOTHING)(*leaves)[0] * scale
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    held = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    assert all(map(torch.equal, torch.autograd.grad(loss, leaves), held))


@pytest.mark.parametrize("kind", ["loss", "tokens"])
def test_second_derivative(backend, kind):
    given, target = operands(torch.float32, of(backend), rows=6)

    def penalty(module):
        call = (
            loss_of(module, target, Objective(z_loss=0.1, transform=Transform(softcap=3.0)), NOTHING)
            if kind == "loss"
            else tokens_of(module, target, Objective(), Wanted(True, True))
        )

        def run(*inputs):
            found = torch.autograd.grad([each.sum() for each in call(*inputs)], inputs, create_graph=True)
            return sum((gradient**2).sum() for gradient in found)

        return run

    assert_matches(penalty(backend), penalty(reference), given)


def test_a_gradient_that_is_there_and_a_weight_that_is_tied(backend):
    (_, weight, _), target = operands(torch.float32, of(backend))
    tokens = torch.randint(0, VOCAB, (ROWS,), device=of(backend))
    found = []
    for module in (backend, reference):
        table = weight.clone().requires_grad_()
        table.grad = held = torch.ones_like(table)
        loss = loss_of(module, target, Objective(), NOTHING)
        for _ in range(2):
            loss(functional.embedding(tokens, table), table)[0].backward()
        assert table.grad is held
        found.append(held)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("many", [True, False])
def test_what_is_ignored_and_infinite_has_no_gradient(backend, many):
    (x, weight, _), target = operands(torch.float32, of(backend))
    x[1] = torch.inf
    if not many:  # one ignored row is not worth a copy of the others
        target[2:] = target[2:].where(target[2:] != -100, 3)
    x.requires_grad_()
    loss_of(backend, target, Objective(), NOTHING)(x, weight)[0].backward()
    assert target[1] == -100 and not x.grad[1].any() and x.grad.isfinite().all()


def test_a_weight_of_zero_is_as_good_as_a_row_to_ignore(backend):
    given, target = operands(torch.float32, of(backend))
    weights = torch.rand(ROWS, device=of(backend))
    weights[::3] = 0
    ignored = target.where(weights != 0, -100)
    sides = [loss_of(backend, each, Objective(loss_weights=weights), NOTHING) for each in (target, ignored)]
    assert_matches(*sides, given)


def test_equal_bits_from_run_to_run(backend):
    given, target = operands(torch.float32, of(backend))
    runs = [gradients(loss_of(backend, target, Objective()), given, [True] * 3) for _ in range(2)]
    for one, other in zip(*([*outputs, *found] for outputs, found in runs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["torch", pytest.param("npu", marks=pytest.mark.slow), "triton"])
def test_is_traced_without_a_graph_break(name, request):
    backend = backend_of(name, request)
    given, target = operands(torch.float32, of(backend), rows=9)
    torch.compiler.reset()
    for call in (
        loss_of(backend, target, Objective(num_items=7), Wanted(True, backend is not npu, False)),
        tokens_of(backend, target, Objective(), Wanted(True, True, False)),
    ):
        assert_matches(torch.compile(call, fullgraph=True, backend="aot_eager"), call, given)


def test_checkpointing_repeats_it():
    given, target = operands(torch.float32)
    loss = loss_of(chunked, target, Objective(), NOTHING)
    again = lambda *x: torch.utils.checkpoint.checkpoint(loss, *x, use_reentrant=False)  # noqa: E731
    assert_matches(again, loss, given)


@pytest.mark.parametrize("name", ["triton", "npu"])
def test_unable(name, request):
    backend = backend_of(name, request)
    (x, weight, _), _ = operands(torch.float32)
    assert backend.unable(x, weight, Objective(), NOTHING) is None
    assert "float64" in backend.unable(x.double(), weight.double(), Objective(), NOTHING)
    assert "empty" in backend.unable(x, weight[:0], Objective(), NOTHING)


def test_integers_are_no_hidden_states():
    (x, weight, _), _ = operands(torch.float32)
    assert "int64" in chunked.unable(x.long(), weight, Objective(), NOTHING)


class TestOnAscend:
    """What of it torch_npu's operator computes: losses without statistics but log-probabilities and predictions."""

    PLAIN = ("plain", "num_items", "ignore_index", "loss_weights", "weights, num_items", "float32")

    @pytest.fixture(autouse=True)
    def kernels(self, request):
        return backend_of("npu", request)

    @pytest.mark.parametrize("wanted", [NOTHING, Wanted(True, False, True), EVERYTHING], ids=str)
    @pytest.mark.parametrize("name", OBJECTIVES)
    def test_what_it_is_called_for(self, name, wanted, called):
        given, target = operands(torch.float32)
        matches(npu, given, target, OBJECTIVES[name]("cpu"), wanted)
        assert bool(called) is (name in self.PLAIN and not wanted.entropy)
        assert set(called) <= {"npu_cross_entropy_loss", "npu_cross_entropy_loss_backward"}

    @pytest.mark.parametrize("trained", [True, False])
    def test_its_backward_is_called_where_something_is_trained(self, trained, called):
        given, target = operands(torch.float32)
        sides = [loss_of(module, target, Objective(), NOTHING) for module in (npu, reference)]
        assert_matches(*sides, given, [trained] * 3)
        assert ("npu_cross_entropy_loss_backward" in called) is trained

    def test_where_rows_to_ignore_are_not_left_out(self, monkeypatch):
        """As on a device, where their number would have to be waited for."""
        selected = classmethod(lambda cls, x, target, form, vocab: cls(x, target, None))
        monkeypatch.setattr(chunked._Selected, "of", selected)
        given, target = operands(torch.float32)
        matches(npu, given, target, wanted=NOTHING)

    def test_the_operators_keep_their_contracts(self):
        logits, target = torch.randn(4, 9), torch.randint(9, (4,))
        ops = torch.ops.veomni_hook
        torch.library.opcheck(ops.npu_cross_entropy.default, (logits, target))
        log_probs = ops.npu_cross_entropy(logits, target)[1]
        torch.library.opcheck(ops.npu_cross_entropy_backward.default, (torch.rand(4), log_probs, target))
