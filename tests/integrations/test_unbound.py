"""What VeOmni's code gets where nobody installed its loss or bound its slots; no VeOmni is needed."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss, ForSequenceClassificationLoss

from veomni_hook.integrations.veomni.unbound import is_eager, kernel_of, loss_of
from veomni_hook.kernels.causal_conv.reference import depthwise
from veomni_hook.kernels.gated_delta_rule.reference import scalar_decay

ENDS = torch.tensor([0, 3, 7])
LABELS = torch.tensor([[1, 4, -100, 2]])


def model(loss_function):
    return SimpleNamespace(loss_function=loss_function)


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 4, 3, generator=generator), torch.randn(5, 3, generator=generator)


@pytest.mark.parametrize("given", [True, False])
def test_transformers_loss_is_the_first_of_what_is_unpacked(operands, given):
    hidden_states, weights = operands
    logits = functional.linear(hidden_states, weights)
    loss, rows, aux = loss_of(model(ForCausalLMLoss), 3)(
        logits=logits if given else None, labels=LABELS, vocab_size=5, hidden_states=hidden_states,
        weights=weights, temperature=1.0, num_items_in_batch=torch.tensor(2),
    )  # fmt: skip
    assert loss == ForCausalLMLoss(logits, LABELS, 5, num_items_in_batch=torch.tensor(2))
    assert torch.equal(rows, logits[0]) and aux is None


def test_with_classes_each_position_has_a_label():
    logits = torch.arange(12.0).sin().view(1, 4, 3)
    labels = torch.tensor([[-100, 2, -100, 0]])
    loss, _, _ = loss_of(model(ForSequenceClassificationLoss), 3)(logits=logits, labels=labels, num_labels=3)
    assert loss == functional.cross_entropy(logits[0], labels[0])


def test_another_loss_stays():
    def own(**given):
        raise AssertionError(given)

    assert loss_of(model(own), 3) is own


@pytest.mark.parametrize(
    ("bound", "eager", "expected"), [(False, False, True), (True, True, True), (True, False, False)]
)
def test_what_is_not_bound_is_eager(bound, eager, expected):
    assert is_eager(SimpleNamespace(is_bound=bound, use_eager_impl=eager)) is expected


def unbound(op):
    return kernel_of(SimpleNamespace(is_bound=False, op_name=op))


def test_a_bound_kernel_stays_and_others_have_eager_code():
    assert kernel_of(SimpleNamespace(is_bound=True, bound_kernel=lambda: torch.add)) is torch.add
    assert unbound("rms_norm") is None


def test_linear_attention_keeps_samples_apart():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 7, 6, generator=generator), torch.randn(6, 4, generator=generator)
    output, last = unbound("causal_conv1d")(
        x=x, weight=weight, bias=None, activation="silu", seq_idx=None, backend="triton", cu_seqlens=ENDS
    )
    expected = depthwise(x.transpose(1, 2), weight, None, "silu", ENDS).transpose(1, 2)
    assert torch.allclose(output, expected, atol=1e-6) and last is None
    q, k, v = (torch.randn(1, 7, 2, 4, generator=generator) for _ in range(3))
    g, beta = -torch.rand(1, 7, 2, generator=generator), torch.rand(1, 7, 2, generator=generator)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": ENDS}
    found = unbound("chunk_gated_delta_rule")(q, k, v, g=g, beta=beta, initial_state=None, **options)
    for mine, other in zip(found, scalar_decay(q, k, v, g, beta, **options), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)
