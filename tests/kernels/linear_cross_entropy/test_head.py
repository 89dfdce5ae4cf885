from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

from veomni_hook.kernels.linear_cross_entropy import head as heads
from veomni_hook.kernels.linear_cross_entropy.head import LossInput, LossRequest
from veomni_hook.kernels.linear_cross_entropy.reference import linear_cross_entropy

TARGET = torch.tensor([1, 4, -100, 2])


def refuses(head):
    return heads.refuses(head, head)


def ask(head, hidden_states=None):
    """Call ``head`` with a request; return its answer, the request, and what both should be."""
    hidden_states = torch.randn(1, 4, 8) if hidden_states is None else hidden_states
    request = LossRequest(linear_cross_entropy, TARGET)
    answer = head(LossInput(hidden_states, request))
    logits = functional.linear(hidden_states, head.weight, head.bias)
    return answer, request, logits, functional.cross_entropy(logits.float().view(-1, 5), TARGET)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_answers_with_the_loss(bias):
    with torch.device("cpu"):
        head = nn.Linear(8, 5, bias=bias)
        answer, request, _, loss = ask(head)
    assert refuses(head) is None
    assert answer is request.loss and torch.allclose(answer, loss)


def test_parametrised_weights_are_the_ones_that_count():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    head = nn.Linear(8, 5)
    nn.utils.parametrize.register_parametrization(head, "weight", Doubled())
    answer, _, _, loss = ask(head)
    assert refuses(head) is None
    assert torch.allclose(answer, loss)


def test_weights_that_do_not_suit_give_logits():
    strange = torch.randn(1, 4, 8).as_subclass(type("Strange", (torch.Tensor,), {}))
    answer, request, logits, _ = ask(nn.Linear(8, 5), strange)
    assert request.loss is None and "Strange" in request.reason
    assert torch.equal(answer, logits)


def test_dtypes_that_do_not_mix_fail_as_upstream_does():
    request = LossRequest(linear_cross_entropy, TARGET)
    with pytest.raises(RuntimeError, match="same dtype"):
        nn.Linear(8, 5)(LossInput(torch.randn(1, 4, 8).bfloat16(), request))
    assert "dtypes" in request.reason


def test_nothing_else_can_be_done_with_a_loss_input():
    with pytest.raises(TypeError):
        torch.relu(LossInput(torch.randn(2), LossRequest(linear_cross_entropy, TARGET)))


class Lora(nn.Linear):
    def forward(self, input):
        return super().forward(input) + 1


def with_forward(head):
    head.forward = lambda x: x
    return head


def hooked(register):
    def change(head):
        getattr(head, register)(lambda *_: None)
        return head

    return change


#: What is done to a Linear that is the head, and to a module around one (`Decoder`).
REFUSED = {
    "Lora": (lambda _: Lora(8, 5), lambda head: setattr(head, "out", Lora(8, 5))),
    "Sequential": (lambda head: nn.Sequential(head), None),
    "OptimizedModule": (lambda head: torch.compile(head, backend="eager"), None),
    "compiled": (lambda head: head.compile(backend="eager"), lambda head: head.compile(backend="eager")),
    "has its own forward": (with_forward, None),
    "hook": (hooked("register_forward_hook"), hooked("register_forward_hook")),
    "hook from": (
        hooked("register_forward_pre_hook"),
        lambda head: hooked("register_forward_hook")(head.out),
    ),
    "backward hooks": (hooked("register_full_backward_hook"), hooked("register_full_backward_hook")),
    "backward hooks, which": (hooked("register_full_backward_pre_hook"), None),
    "a hook": (lambda head: nn.utils.spectral_norm(head), None),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses(reason):
    change, inside = REFUSED[reason]
    head = nn.Linear(8, 5)
    changed = change(head)
    assert reason in refuses(head if changed is None else changed)
    if inside is not None:
        around = Decoder()
        inside(around)
        assert reason in heads.refuses(around, around.out)


def test_refuses_under_hooks_for_all_modules():
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert "global hook" in refuses(nn.Linear(8, 5))
    assert refuses(nn.Linear(8, 5)) is None


def test_refuses_where_linear_was_replaced(monkeypatch):
    monkeypatch.setattr(functional, "linear", lambda *args: None)
    reason = refuses(nn.Linear(8, 5))
    monkeypatch.undo()
    assert "replaced" in reason


def test_is_seen_by_those_who_look_for_tensors():
    carrier = LossInput(torch.randn(2, 8), LossRequest(linear_cross_entropy, TARGET))
    leaves, spec = _pytree.tree_flatten((carrier, {}))
    assert leaves[0] is carrier.hidden_states
    rebuilt, _ = _pytree.tree_unflatten([leaves[0] * 2], spec)
    assert torch.equal(rebuilt.hidden_states, carrier.hidden_states * 2)
    assert rebuilt.request is carrier.request
    assert replace(carrier, hidden_states=leaves[0]).request is carrier.request
    assert carrier.to(torch.bfloat16).hidden_states.dtype is torch.bfloat16


def test_accelerates_device_hook_passes_it_on():
    hooks = pytest.importorskip("accelerate.hooks")
    head = nn.Linear(8, 5)
    hooks.add_hook_to_module(head, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    answer, request, _, loss = ask(head)
    assert refuses(head) is None
    assert request.loss is not None and torch.allclose(answer, loss)


class Decoder(nn.Module):
    """A head around its Linear; ``after`` is what it does to logits."""

    def __init__(self, after=lambda logits: logits, bias=True):
        super().__init__()
        self.dense, self.out, self.after, self.calls = nn.Linear(8, 8), nn.Linear(8, 5, bias=bias), after, 0

    def forward(self, x):
        self.calls += 1
        return self.after(self.out(torch.tanh(self.dense(x))))


def ask_inside(head):
    hidden_states = torch.randn(1, 4, 8)
    request = LossRequest(linear_cross_entropy, TARGET)
    answer = heads.ask(head, head.out, hidden_states, request)
    logits = head(hidden_states)
    head.calls -= 1
    return answer, request, logits


def test_a_module_around_the_linear_answers_with_the_loss():
    head = Decoder()
    answer, request, logits = ask_inside(head)
    assert heads.refuses(head, head.out) is None
    assert answer is request.loss and torch.allclose(answer, functional.cross_entropy(logits[0], TARGET))
    assert head.calls == 1 and not head.out._forward_pre_hooks


AFTERWARDS = {
    "scaled": lambda logits: logits * 2,
    "copied": lambda logits: logits.clone(),
    "reshaped": lambda logits: logits.view(1, 4, 5),
    "in a tuple": lambda logits: (logits,),
}


@pytest.mark.parametrize("after", AFTERWARDS.values(), ids=AFTERWARDS)
def test_a_module_that_changes_logits_is_asked_for_them_again(after):
    head = Decoder(after)
    answer, request, logits = ask_inside(head)
    assert request.loss is None and "head returns" in request.reason
    assert torch.equal(
        answer[0] if isinstance(answer, tuple) else answer, logits[0] if isinstance(logits, tuple) else logits
    )
    assert head.calls == 2 and not head.out._forward_pre_hooks


def test_a_failure_before_the_loss_is_the_heads_own():
    def fail(_):
        raise ValueError("its own")

    head = Decoder()
    head.dense.register_forward_pre_hook(lambda *_: fail(None))
    request = LossRequest(linear_cross_entropy, TARGET)
    with pytest.raises(ValueError, match="its own"):
        heads.ask(head, head.out, torch.randn(1, 4, 8), request)
    assert not head.out._forward_pre_hooks


def test_a_failure_after_the_loss_fails_again_on_logits():
    def fail(logits):
        raise ValueError(f"its own {logits.dim()}")

    with pytest.raises(ValueError, match="its own 3"):
        ask_inside(Decoder(fail))


def test_a_linear_called_by_keyword_gives_logits():
    class Keyword(Decoder):
        def forward(self, x):
            return self.out(input=torch.tanh(self.dense(x)))

    head = Keyword()
    answer, request, logits = ask_inside(head)
    assert request.loss is None and torch.equal(answer, logits)


def test_unsuited_weights_inside_a_module_cost_one_call():
    head = Decoder()
    head.out = head.out.double()
    request = LossRequest(linear_cross_entropy, TARGET)
    with pytest.raises(RuntimeError, match="same dtype"):
        heads.ask(head, head.out, torch.randn(1, 4, 8), request)
    assert "dtypes" in request.reason


def test_a_hook_beside_the_linear_is_no_matter():
    head = Decoder()
    head.dense.register_forward_hook(lambda *_: None)
    assert heads.refuses(head, head.out) is None


class Model(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.get_output_embeddings = embeddings


def test_the_last_linear_of_a_head():
    head, linear = Decoder(), nn.Linear(8, 5)
    assert heads.last_linear(Model(lambda: head.out), head) is head.out
    assert heads.last_linear(Model(lambda: head.out), linear) is linear
    assert heads.last_linear(Model(lambda: None), head) is head
    assert heads.last_linear(Model(None), head) is head
    assert heads.last_linear(Model(lambda: linear), head) is head, "not a part of the head"
    assert "Decoder" in heads.refuses(head, head)
    bound = head.forward
    assert heads.last_linear(Model(lambda: head.out), bound) is bound
    assert "method" in heads.refuses(bound, bound)
