"""The divergence from a teacher's k most probable tokens: of every backend, against the plain formula."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.linear_cross_entropy.objectives import ROWS, TOKENS, VOCAB, operands, weights
from tests.kernels.linear_cross_entropy.test_backends import BACKENDS, DTYPES, backend_of, of
from tests.kernels.matching import assert_matches
from veomni_hook.kernels.linear_cross_entropy import chosen_tokens, reference
from veomni_hook.kernels.linear_cross_entropy.objective import Objective, Teacher, Transform, Wanted

K = 5
NUMBERS = ("log_probs", "entropy", "distillation_losses", "student_mass")


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    monkeypatch.setattr(chosen_tokens, "_PAIRS", 3 * K * K)
    return backend_of(request.param, request)


def teacher_of(target, clamp=None, k=K):
    """What a teacher says: a row has its label, one a token twice, one a token that the teacher excludes."""
    ids = torch.rand(len(target), VOCAB).argsort()[:, :k]
    log_probs = torch.randn(len(target), VOCAB).log_softmax(-1).gather(1, ids)
    if len(target) > 6:
        ids[0, 2], ids[2, 4], ids[3, 1] = target[0], ids[2, 0], ids[3, 0]
        ids[3, 4] = ids[3, 2] = target[3]
        log_probs[4, 3] = -torch.inf
        ids[target.cpu() == -100] = VOCAB + 7  # of ignored rows, they may be anything
    return Teacher(ids.to(target.device), log_probs.to(target.device), clamp)


def formula(x, weight, bias, target, objective):
    """The numbers of `NUMBERS`, from all logits, written down anew."""
    logits = objective.transform(functional.linear(x, weight, bias)).float()
    counts = target != objective.ignore_index
    ids, log_p, clamp = objective.teacher
    q = logits.log_softmax(-1)
    at = torch.stack([q[row][ids[row] * counts[row]] for row in range(len(target))])
    mass = at.exp().sum(-1)
    if clamp is not None:
        at, log_p = at.clamp(min=clamp), log_p.clamp(min=clamp)
    log_p = log_p.clamp(min=-200)  # where p is 0, and not infinity times 0
    losses = (log_p.exp() * (log_p - at)).sum(-1)
    label = q.gather(1, (target * counts)[:, None])[:, 0]
    numbers = label, -(q.exp() * q).sum(-1), losses, mass
    return tuple(each.where(counts, 0) for each in numbers)


def found_by(module, target, objective, names=NUMBERS):
    def call(x, weight, bias=None):
        wanted = Wanted("log_probs" in names, "entropy" in names, distillation=True)
        found = module.token_statistics(x, weight, bias, target, objective, wanted)
        assert not found.teacher_mass.requires_grad
        return tuple(getattr(found, name) for name in names)

    return call


@pytest.mark.sample(13)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clamp", [None, -5.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_numbers_and_gradients(backend, softcap, clamp, dtype):
    given, target = operands(dtype, of(backend))
    objective = Objective(transform=Transform(scale=0.7, softcap=softcap), teacher=teacher_of(target, clamp))
    expected = lambda *inputs: formula(*inputs, target, objective)  # noqa: E731
    assert_matches(found_by(backend, target, objective), expected, given, tolerance=TOKENS[dtype])


@pytest.mark.parametrize(
    "names", [NUMBERS[2:3], NUMBERS[3:], (NUMBERS[0], NUMBERS[3]), NUMBERS[1:3]], ids=str
)
def test_a_gradient_of_some_of_them(backend, names):
    given, target = operands(torch.float32, of(backend))
    objective = Objective(teacher=teacher_of(target))
    chosen = [NUMBERS.index(name) for name in names]
    expected = lambda *inputs: tuple(formula(*inputs, target, objective)[each] for each in chosen)  # noqa: E731
    assert_matches(found_by(backend, target, objective, names), expected, given, tolerance=1e-5)


@pytest.mark.parametrize("backend_name", ["torch", "triton"])
def test_masses(backend_name, request):
    backend = backend_of(backend_name, request)
    (x, weight, bias), target = operands(torch.float32, of(backend))
    teacher = teacher_of(target)
    found = backend.token_statistics(
        x, weight, bias, target, Objective(teacher=teacher), Wanted(distillation=True)
    )
    assert found[:3] == (None, None, None)
    expected = teacher.topk_log_probs.exp().sum(-1).where(target != -100, 0)
    torch.testing.assert_close(found.teacher_mass, expected)
    # A teacher that has all tokens and agrees.
    ids = torch.arange(VOCAB, device=x.device).expand(ROWS, -1)
    own = functional.linear(x, weight, bias).log_softmax(-1)
    found = backend.token_statistics(
        x, weight, bias, target, Objective(teacher=Teacher(ids, own)), Wanted(distillation=True)
    )
    assert found.distillation_losses.abs().max() < 1e-5
    torch.testing.assert_close(found.student_mass, (target != -100).float())


def losses_of(module, target, objective):
    def call(x, weight, bias=None):
        return module.loss_and_statistics(x, weight, bias, target, objective, Wanted())[0]

    return call


OBJECTIVES = {
    "alone": {"distillation": 1.0},
    "a share": {"distillation": 0.3},
    "weights, z-loss": {"distillation": 0.3, "z_loss": 0.01, "num_items": 7},
    "a cap, float32": {"distillation": 0.3, "transform": Transform(divisor=0.7, softcap=3.0), "accumulate": "float32"},
}  # fmt: skip


@pytest.mark.sample(17)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("clamp", [None, -5.0])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss(backend, name, clamp, dtype):
    given, target = operands(dtype, of(backend))
    objective = Objective(**OBJECTIVES[name], teacher=teacher_of(target, clamp))
    if name.startswith("weights"):
        objective = objective._replace(loss_weights=weights(of(backend)))

    def expected(x, weight, bias):
        log_probs, _, losses, _ = formula(x, weight, bias, target, objective)
        counts = (target != -100).float() if objective.loss_weights is None else objective.loss_weights
        counts = counts.where(target != -100, 0)
        lse = objective.transform(functional.linear(x, weight, bias)).float().logsumexp(-1)
        share = objective.distillation
        every = share * losses + (1 - share) * (objective.z_loss * lse.square() - log_probs)
        return (counts * every).sum() / (objective.num_items or counts.sum())

    assert_matches(losses_of(backend, target, objective), expected, given)
    assert_matches(losses_of(reference, target, objective), expected, given)


@pytest.mark.parametrize("kind", ["loss", "numbers"])
def test_second_derivatives(backend, kind):
    given, target = operands(torch.float32, of(backend), rows=7)
    objective = Objective(transform=Transform(softcap=3.0), teacher=teacher_of(target), distillation=0.4)

    def penalty(module):
        call = losses_of if kind == "loss" else found_by

        def run(*inputs):
            found = call(module, target, objective)(*inputs)
            found = found if isinstance(found, tuple) else (found,)
            slopes = torch.autograd.grad([each.sum() for each in found], inputs, create_graph=True)
            return sum((slope**2).sum() for slope in slopes)

        return run

    assert_matches(penalty(backend), penalty(reference), given)


def test_equal_bits_from_run_to_run(backend):
    given, target = operands(torch.float32, of(backend))
    objective = Objective(teacher=teacher_of(target), distillation=0.4)
    for call in (losses_of, found_by):
        function = call(backend, target, objective)
        assert_matches(function, function, given, exact=True)


@pytest.mark.parametrize("name", [pytest.param("torch", marks=pytest.mark.slow), "triton"])
def test_is_traced_without_a_graph_break(name, request):
    backend = backend_of(name, request)
    given, target = operands(torch.float32, of(backend), rows=9)
    objective = Objective(teacher=teacher_of(target, -5.0), distillation=0.4)
    torch.compiler.reset()
    for call in (losses_of(backend, target, objective), found_by(backend, target, objective)):
        assert_matches(torch.compile(call, fullgraph=True, backend="aot_eager"), call, given)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_and_none_that_count(backend, rows):
    given, target = operands(torch.float32, of(backend), rows=rows)
    objective = Objective(teacher=teacher_of(target.fill_(-100)), distillation=0.4)
    assert_matches(found_by(backend, target, objective), found_by(reference, target, objective), given)
    assert_matches(losses_of(backend, target, objective), losses_of(reference, target, objective), given)
