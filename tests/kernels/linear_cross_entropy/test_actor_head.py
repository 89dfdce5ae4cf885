"""`actor_head` in an actor of verl's form: samples without padding in one row, temperature, entropy."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

import veomni_hook
from tests.kernels.linear_cross_entropy.routed import Watching
from veomni_hook.errors import KernelError, VeomniHookWarning
from veomni_hook.kernels.linear_cross_entropy import actor_head
from veomni_hook.kernels.linear_cross_entropy.actor_head import log_probs

TEMPERATURE = 0.7


class Rows:
    """What verl's autograd function has of an interface, by definition."""

    calls = 0

    @staticmethod
    def forward(ctx, hidden_states, vocab_weights, input_ids, temperature=1.0, chunk_size=512):
        raise AssertionError("autograd is not needed: apply is plain")

    @classmethod
    def apply(cls, hidden, weight, tokens, temperature, chunk_size):
        cls.calls += 1
        every = ((hidden @ weight.t()) / temperature).float().log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
        return every.gather(-1, tokens[..., None])[..., 0], entropy.to(hidden.dtype)


class Actor(nn.Module):
    """A forward of verl's form: the backbone, the tokens rolled by one, the head's weight."""

    def __init__(self, model, head):
        super().__init__()
        self.model, self.head = model, head

    def forward(self, input_ids, position_ids, temperature):
        hidden = self.model.model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=None, use_cache=False
        )[0]
        return self.head(hidden, self.model.lm_head.weight, input_ids.roll(-1, -1), temperature, 512)


def model_of(module=modeling_qwen3):
    torch.manual_seed(0)
    config = module.Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    return module.Qwen3ForCausalLM(config)


def responses(found, lengths, answers):
    """The positions that predict the answers, of each sample in the row."""
    parts = zip(found.squeeze(0).split(lengths), answers, strict=True)
    return torch.cat([part[-answer - 1 : -1] for part, answer in parts])


def test_a_packed_actor_computes_what_upstreams_logits_of_each_sample_say():
    lengths, answers = [9, 5, 12], [4, 2, 7]
    model = model_of()
    samples = [torch.randint(0, 61, (1, length)) for length in lengths]
    packed = torch.cat(samples, 1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    actor = Actor(model, lambda *operands: log_probs(Rows, *operands))
    before = Rows.calls
    log_p, entropy = (
        responses(each, lengths, answers) for each in actor(packed, positions, temperature=TEMPERATURE)
    )
    assert Rows.calls == before
    factors = torch.randn(2, sum(answers))
    of_ours = torch.autograd.grad((log_p * factors[0] + entropy * factors[1]).sum(), [*model.parameters()])

    expected, entropies = [], []
    for sample, answer in zip(samples, answers, strict=True):
        logits = model(input_ids=sample, use_cache=False).logits[:, -answer - 1 : -1] / TEMPERATURE
        every = logits.float().log_softmax(-1)
        expected.append(every.gather(-1, sample[:, -answer:, None])[0, :, 0])
        entropies.append(-(every.exp() * every).sum(-1)[0])
    torch.testing.assert_close(log_p, torch.cat(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, torch.cat(entropies), rtol=1e-4, atol=1e-4)
    loss = (torch.cat(expected) * factors[0] + torch.cat(entropies) * factors[1]).sum()
    of_upstream = torch.autograd.grad(loss, [*model.parameters()])
    for one, other in zip(of_ours, of_upstream, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_an_actor_that_asks_the_model_has_the_same_fields(patched):
    """Without any function of verl: the rolled tokens as `shift_labels`."""
    model = model_of(patched)
    tokens = torch.randint(0, 61, (1, 14))
    with veomni_hook.loss_options(token_outputs=("log_probs", "entropy"), temperature=TEMPERATURE):
        output = model(
            input_ids=tokens, labels=tokens, shift_labels=tokens.roll(-1, -1).contiguous(), use_cache=False
        )
    expected, entropy = Actor(model, Rows.apply)(tokens, None, TEMPERATURE)
    torch.testing.assert_close(output.log_probs, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.entropy, entropy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(13,), (2, 7), (0,)])
def test_in_bfloat16(shape):
    torch.manual_seed(1)
    hidden = torch.randn(*shape, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(40, 16) / 4).bfloat16().requires_grad_()
    tokens = torch.randint(0, 40, shape)
    got = log_probs(Rows, hidden, weight, tokens, 1.3, 512)
    expected = Rows.apply(hidden, weight, tokens, 1.3, 512)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.05)
    for loss in (got, expected):
        (loss[0].sum() + loss[1].float().sum()).backward()


def test_what_does_not_suit_is_left_to_the_function_with_a_warning():
    hidden, weight = torch.randn(3, 4, dtype=torch.float64), torch.randn(7, 4)
    given = (hidden, weight, torch.randint(0, 7, (3,)), 1.0, 512)

    class Taken(Rows):
        @classmethod
        def apply(cls, *given):
            return "its own"

    class Later(Taken):
        @staticmethod
        def forward(ctx, hidden_states, vocab_weights, temperature, input_ids, chunk_size):
            raise AssertionError

    with pytest.warns(VeomniHookWarning, match="different dtypes"):
        assert log_probs(Taken, *given) == "its own"
    with pytest.warns(VeomniHookWarning, match="not those that this release"):
        assert log_probs(Later, *given) == "its own"
    fitting = (hidden.float(), *given[1:])
    with Watching(), pytest.warns(VeomniHookWarning, match="Watching is active"):
        assert log_probs(Taken, *fitting) == "its own"
    with veomni_hook.use_kernels(linear_cross_entropy="eager"):
        assert log_probs(Taken, *given) == "its own"
    with pytest.raises(KernelError, match="temperature"):
        log_probs(Taken, hidden.float(), weight, given[2], torch.ones(3, 1), 512)


def test_explain_says_how_often_the_head_ran_for_a_forward_that_verl_has_written():
    model = model_of()
    hidden, weight = torch.randn(3, 4), torch.randn(7, 4)
    written: dict = {"__name__": "verl.models.transformers.dense_common"}
    exec("def forward(self): pass", written)

    class Replaced(type(model)):
        forward = written["forward"]

    model.__class__ = Replaced
    before = actor_head.told().get(None, 0)
    log_probs(Rows, hidden, weight, torch.randint(0, 7, (3,)), 1.0, 512)
    said = f"verl's log-probabilities: veomni_hook.token_log_probs in {before + 1} call"
    assert said in str(veomni_hook.explain(model))
    assert said not in str(veomni_hook.explain(model_of()))
