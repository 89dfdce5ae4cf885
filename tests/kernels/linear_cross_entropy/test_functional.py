import pytest
import torch
from torch.nn import functional as F

from tests.kernels.matching import assert_matches, close
from tests.kernels.slot.test_repeated import tells_hooks
from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy import functional
from veomni_hook.kernels.selection.process_choice import set_choice

BACKENDS = [None, "torch", "reference"]


def operands():
    target = torch.randint(0, 61, (2, 9))
    target[0, :3] = 7
    return [torch.randn(2, 9, 16), torch.randn(61, 16) * 0.3, torch.randn(61)], target


def logits_of(x, weight, bias):
    return 3 * torch.tanh(F.linear(x, weight, bias) * 0.7 / 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss(backend):
    given, target = operands()
    weights = torch.rand(2, 9)

    def ours(x, weight, bias):
        return functional.linear_cross_entropy(
            x, weight, target, bias, ignore_index=7, label_smoothing=0.1, z_loss=0.2, num_items=5,
            loss_weights=weights, softcap=3.0, scale=0.7, accumulate="float32", backend=backend,
        )  # fmt: skip

    def expected(*inputs):
        logits = logits_of(*inputs)
        losses = F.cross_entropy(logits.transpose(1, 2), target, label_smoothing=0.1, reduction="none")
        return (weights * (losses + 0.2 * logits.logsumexp(-1) ** 2)).where(target != 7, 0).sum() / 5

    assert_matches(ours, expected, given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens(backend):
    given, target = operands()

    def ours(x, weight, bias):
        found = functional.token_log_probs(
            x, weight, target, bias=bias, ignore_index=7, softcap=3.0, scale=0.7, entropy=True, predictions=True,
            backend=backend,
        )  # fmt: skip
        return found.log_probs, found.entropy, found.predictions.float()

    def expected(*inputs):
        every, counts = logits_of(*inputs).log_softmax(-1), target != 7
        log_probs = every.gather(-1, target[..., None])[..., 0].where(counts, 0)
        entropy = -(every.exp() * every).sum(-1).where(counts, 0)
        return log_probs, entropy, every.argmax(-1).where(counts, 7).float()

    assert_matches(ours, expected, given)


def test_only_what_is_asked_for():
    (x, weight, _), target = operands()
    found = functional.token_log_probs(x, weight, target)
    assert found.log_probs.shape == (2, 9) and found.entropy is found.predictions is None


@pytest.mark.parametrize(("choice", "home"), [("auto", "torch"), ("eager", "reference"), ("torch", "torch")])
def test_the_backend_is_the_chosen_one(choice, home, monkeypatch):
    set_choice(f"linear_cross_entropy={choice}")
    (x, weight, _), target = operands()
    module = __import__(f"veomni_hook.kernels.linear_cross_entropy.{home}", fromlist=["_"])
    asked = []
    monkeypatch.setattr(module, "loss_and_statistics", lambda *call: asked.append(call) or (x.sum(), None))
    functional.linear_cross_entropy(x, weight, target)
    assert asked


def test_the_default_is_torchs_cross_entropy():
    (x, weight, bias), target = operands()
    loss = functional.linear_cross_entropy(x, weight, target, bias)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, weight, bias).transpose(1, 2), target))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": torch.zeros(2, 8, dtype=torch.int64)}, r"the target is.*[^$]*the shape \[2, 9\] and"),
        ({"target": torch.zeros(2, 9, dtype=torch.int32)}, "int32"),
        ({"weight": torch.zeros(61, 15)}, r"do not match[^$]*\[vocab, hidden\]"),
        ({"bias": torch.zeros(60)}, r"do not match[^$]*a bias of the shape \[61\]"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"softcap": torch.ones(())}, "softcap"),
        ({"loss_weights": torch.ones(18)}, "loss_weights have the shape"),
        ({"backend": "cutlass"}, "there is no backend"),
        ({"backend": "triton"}, "needs a device of type cuda"),
        ({"hidden_states": torch.zeros(2, 9, 16).as_subclass(type("Odd", (torch.Tensor,), {}))}, "Odd"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_not_valid(change, reason):
    (x, weight, _), target = operands()
    call = {"hidden_states": x, "weight": weight, "target": target} | change
    with pytest.raises(KernelError, match=reason) as caught:
        functional.linear_cross_entropy(**call)
    assert "backend" in change or caught.value.where == "linear_cross_entropy"
    call = {name: value for name, value in call.items() if name not in ("label_smoothing", "loss_weights")}
    if call.keys() >= change.keys() and "backend" not in change:
        with pytest.raises(KernelError, match=reason) as caught:
            functional.token_log_probs(**call)
        assert caught.value.where == "token_log_probs" and "documentation" not in caught.value.fix


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_is_traced_without_a_graph_break(backend):
    given, target = operands()

    def loss(x, weight, bias):
        return functional.linear_cross_entropy(x, weight, target, bias, ignore_index=7, backend=backend)

    def tokens(x, weight, bias):
        found = functional.token_log_probs(x, weight, target, bias=bias, entropy=True, backend=backend)
        return found.log_probs, found.entropy

    for call in (loss, tokens):
        torch.compiler.reset()
        assert_matches(torch.compile(call, fullgraph=True, backend="aot_eager"), call, given, tolerance=1e-5)


class TestOnAscend:
    def test_its_backend_is_the_chosen_one(self, on_ascend, called):
        given, target = operands()
        sides = (lambda *x, b=b: functional.linear_cross_entropy(*x[:2], target, x[2], backend=b)
                 for b in (None, "reference"))  # fmt: skip
        assert_matches(*sides, given)
        assert "npu_cross_entropy_loss_backward" in called

    def test_by_name_it_is_compiled_in(self, on_ascend):
        given, target = operands()
        torch.compiler.reset()
        sides = (lambda *x, b=b: functional.linear_cross_entropy(*x[:2], target, x[2], backend=b)
                 for b in ("npu", "reference"))  # fmt: skip
        ours, truth = sides
        assert_matches(torch.compile(ours, fullgraph=True, backend="aot_eager"), truth, given)


@tells_hooks
@pytest.mark.parametrize("before, after", [("torch", "eager"), ("eager", "torch")])
def test_a_recomputation_takes_the_backend_of_its_forward(before, after):
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True)
    target = torch.randint(0, 13, (9,))

    def loss_of(hidden):
        factor = 1 + functional.is_eager()
        return factor * functional.token_log_probs(hidden, weight, target).log_probs.sum()

    set_choice(f"linear_cross_entropy={before}")
    loss = torch.utils.checkpoint.checkpoint(loss_of, hidden, use_reentrant=False)
    set_choice(f"linear_cross_entropy={after}")
    got = torch.autograd.grad(loss, [hidden, weight])
    expected = torch.autograd.grad(
        (-1 - (before == "eager")) * F.cross_entropy(hidden @ weight.T, target, reduction="sum"),
        [hidden, weight],
    )
    close(got, expected, 1e-5)
