"""`trainer_head` against a function of TRL's form, and against TRL's own where it is installed."""

import importlib.util
import math

import pytest
import torch
from torch import nn

import veomni_hook
from tests.kernels.linear_cross_entropy.routed import Watching
from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy.trainer_head import compacts, log_probs, told

EVERY = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OURS = ("log_probs", "entropy", "mean_logits", "is_top1")
HAS_TRL = importlib.util.find_spec("trl") is not None


class Plain:
    """What TRL's autograd function has of an interface, by definition and with all logits."""

    calls = 0

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, targets, temperature, chunk_size,
        final_logit_softcapping=None, logit_scale=1.0, outputs=EVERY,
    ):  # fmt: skip
        raise AssertionError("autograd is not needed: apply is plain")

    @classmethod
    def apply(
        cls, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, scale=1.0, outputs=EVERY
    ):
        cls.calls += 1
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        z = nn.functional.linear(hidden, weight, bias).float() * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        z = z / temperature
        every = z.log_softmax(-1)
        found = {
            "entropy": -(every.exp() * every).sum(-1),
            "log_sum_sq_probs": (2 * every.detach()).logsumexp(-1),
            "mean_logits": z.detach().mean(-1),
            "is_top1": z.argmax(-1) == targets,
        }
        chosen = every.gather(-1, targets[:, None])[:, 0]
        return (chosen, *(found[name] if name in outputs else None for name in EVERY))


def trls():
    return pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction


FUNCTIONS = [
    pytest.param(lambda: Plain, id="plain"),
    pytest.param(trls, id="trl", marks=pytest.mark.skipif(not HAS_TRL, reason="`make recipes` has TRL")),
]


def operands(rows=11, hidden=24, vocab=97, dtype=torch.float32, bias=False, strided=False):
    torch.manual_seed(rows + vocab)
    wide = torch.randn(rows, 2 * hidden, dtype=dtype)
    x = wide[:, ::2] if strided else wide[:, :hidden].contiguous()
    weight = torch.randn(vocab, hidden, dtype=dtype) / math.sqrt(hidden)
    b = torch.randn(vocab, dtype=dtype) if bias else None
    leaves = [None if each is None else each.detach().requires_grad_() for each in (x, weight, b)]
    return *leaves, torch.randint(0, vocab, (rows,))


def results(apply, given, rest):
    x, weight, bias, targets = given
    found = apply(x, weight, bias, targets, *rest)
    torch.manual_seed(0)
    loss = (found[0] * torch.randn(targets.shape)).sum()
    if found[1] is not None:
        loss = loss + (found[1] * torch.randn(targets.shape)).sum()
    wanted = [each for each in (x, weight, bias) if each is not None]
    return found, torch.autograd.grad(loss, wanted)


def same(got, expected, **tolerance):
    for one, other in zip(got[0], expected[0], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype is other.dtype
            torch.testing.assert_close(one, other, **tolerance)
    for one, other in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("sizes", "rest"),
    [
        ({}, (1.0, 32, None, 1.0, OURS)),
        ({"bias": True, "strided": True}, (0.7, 32, None, 0.5, OURS)),
        ({"rows": 1, "vocab": 5}, (1.3, 4, 3.0, 2, ("log_probs", "entropy"))),
        ({"rows": 300}, (0.9, 64, None, 1.0, ("log_probs",))),
        ({"rows": 0}, (1.0, 32, None, 1.0, OURS)),
        ({"dtype": torch.bfloat16, "bias": True}, (0.8, 32, None, 1.0, OURS)),
    ],
)
def test_values_and_gradients_are_those_of_the_function(function, sizes, rest):
    function, model = function(), nn.Linear(1, 1)
    given = operands(**sizes)
    got = results(lambda *all_of: log_probs(model, function, *all_of), given, rest)
    assert told(model) == {None: 1}
    close = {"rtol": 1e-5, "atol": 1e-5}
    if given[0].dtype is not torch.float32:
        close = {"rtol": 0.02, "atol": 0.05}
        assert all(found is None or found.dtype in (torch.float32, torch.bool) for found in got[0])
    same(got, results(function.apply, given, rest), **close)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_under_autocast(function):
    function, model = function(), nn.Linear(1, 1)
    given = operands()
    rest = (0.9, 32, None, 1.0, OURS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(lambda *all_of: log_probs(model, function, *all_of), given, rest)
        expected = results(function.apply, given, rest)
    assert told(model) == {None: 1}
    same(got, expected, rtol=0.02, atol=0.05)


def changed(**values):
    rest = {"temperature": 1.0, "chunk": 32, "softcap": None, "scale": 1.0, "outputs": OURS, **values}
    return tuple(rest.values())


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        (changed(outputs=("log_probs", *EVERY)), "log_sum_sq_probs"),
        (changed(softcap=5.0), "capped logits"),
        (changed(scale=torch.tensor(2.0)), "scale of the logits is a Tensor"),
    ],
)
def test_what_the_kernel_lacks_is_left_to_the_function(rest, reason):
    given, model = operands(), nn.Linear(1, 1)
    got = results(lambda *all_of: log_probs(model, Plain, *all_of), given, rest)
    ((said, number),) = told(model).items()
    assert number == 1 and reason in said
    same(got, results(Plain.apply, given, rest), rtol=0, atol=0)


def test_operands_that_do_not_suit_are_left_to_the_function():
    x, weight, bias, targets = operands()
    model = nn.Linear(1, 1)

    class Counting(Plain):
        @classmethod
        def apply(cls, *given):
            return (None,) * 5

    log_probs(model, Counting, x.double(), weight, bias, targets, *changed())
    gathered = weight.detach().clone()
    gathered.ds_id = 0
    log_probs(model, Counting, x, gathered, bias, targets, *changed())
    log_probs(model, Counting, x, weight, bias, targets, *changed(outputs=("log_probs", "variance")))
    said = " | ".join(map(str, told(model)))
    assert "different dtypes" in said and "DeepSpeed" in said and "unknown outputs: variance" in said


def test_another_form_of_the_function_is_left_alone():
    class Later(Plain):
        @staticmethod
        def forward(ctx, hidden, weight, bias, targets, chunk_size, temperature, scale, outputs=EVERY):
            raise AssertionError

    class Reordered(Plain):
        @staticmethod
        def forward(
            ctx, hidden, weight, bias, targets, temperature, chunk_size,
            final_logit_softcapping=None, logit_scale=1.0, outputs=EVERY[::-1],
        ):  # fmt: skip
            raise AssertionError

    for function in (Later, Reordered):
        given, model = operands(), nn.Linear(1, 1)
        log_probs(model, function, *given, *changed(outputs=("log_probs",)))
        ((said, _),) = told(model).items()
        assert "not those that this release" in said


def test_a_mode_that_intercepts_functions_sees_those_of_the_function():
    given, model = operands(), nn.Linear(1, 1)
    with Watching():
        log_probs(model, Plain, *given, *changed(outputs=("log_probs",)))
    ((said, _),) = told(model).items()
    assert "Watching is active" in said


def test_the_choice_of_kernels_counts():
    given, model = operands(), nn.Linear(1, 1)
    with veomni_hook.use_kernels(linear_cross_entropy="eager"):
        before = Plain.calls
        log_probs(model, Plain, *given, *changed(outputs=("log_probs",)))
        assert Plain.calls == before + 1 and told(model) == {"eager is chosen": 1}
        assert compacts(lambda device: False, torch.device("cpu")) is False
    with veomni_hook.use_kernels(linear_cross_entropy="reference"):
        log_probs(model, Plain, *given, *changed(outputs=("log_probs",)))
        assert told(model)[None] == 1
    assert compacts(lambda device: False, torch.device("cpu")) is True
    assert compacts(lambda device: False, torch.device("meta")) is False
    assert compacts(lambda device: True, torch.device("meta")) is True


def test_a_temperature_of_zero_is_an_error():
    given = operands()
    with pytest.raises(KernelError, match="temperature"):
        log_probs(nn.Linear(1, 1), Plain, *given, *changed(temperature=0.0))
