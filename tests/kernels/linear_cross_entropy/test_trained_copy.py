"""A head that PEFT trains as a whole (``modules_to_save``): the loss of the copy that is called."""

import pytest
import torch
from torch import nn

from tests.kernels.linear_cross_entropy.routed import TrainedCopies, batch, pair, with_trained_copies
from tests.kernels.matching import close, grads_of
from veomni_hook.errors import KernelError, VeomniHookWarning
from veomni_hook.kernels.linear_cross_entropy import head as heads
from veomni_hook.kernels.linear_cross_entropy.head import called_by, still_called
from veomni_hook.kernels.linear_cross_entropy.options import loss_options
from veomni_hook.kernels.linear_cross_entropy.output import LazyLogits
from veomni_hook.kernels.selection.process_choice import set_choice


@pytest.fixture(autouse=True)
def named():
    set_choice("linear_cross_entropy=torch")


def gradients(model, output):
    model.zero_grad()
    output.loss.backward()
    return grads_of(model)


def assert_fused_as_upstream(upstream, model):
    inputs = batch()
    expected, output = (each(**inputs) for each in (upstream, model))
    assert isinstance(output, LazyLogits), "the loss was not fused"
    close(output.loss.detach(), expected.loss.detach(), 1e-5)
    close(gradients(model, output), gradients(upstream, expected), 1e-5)
    with loss_options(token_outputs=("log_probs",)):
        fields = model(**inputs)
    close(-fields.log_probs.sum() / (inputs["labels"][:, 1:] != -100).sum(), expected.loss, 1e-5)


STATES = {
    "the first": {},
    "another": {"active_adapter": "b"},
    "none": {"active_adapter": []},
    "one without a copy": {"active_adapter": ["c"]},
    "disabled": {"disable_adapters": True},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_copy_that_is_called_computes_the_loss(patched, state):
    models = with_trained_copies(pair(patched), "a", "b")
    for model in models:
        vars(model.lm_head).update(state)
    assert_fused_as_upstream(*models)


def test_a_wrapper_inside_a_head(patched):
    class Around(nn.Module):
        def __init__(self, out):
            super().__init__()
            self.out = TrainedCopies(out, "a")

        def forward(self, x):
            return self.out(torch.tanh(x))

    models = pair(patched)
    for model in models:
        model.lm_head = head = Around(model.lm_head)
        model.get_output_embeddings = lambda head=head: head.out
    assert_fused_as_upstream(*models)


HOOKED = {
    "the wrapper": lambda head: head,
    "the copies": lambda head: head.modules_to_save,
    "the copy": lambda head: head.modules_to_save["a"],
}


@pytest.mark.parametrize("place", HOOKED.values(), ids=HOOKED)
def test_a_hook_that_may_expect_logits_is_left_to_upstream(patched, place):
    upstream, model = with_trained_copies(pair(patched), "a", "b")
    inputs = batch()
    place(model.lm_head).register_forward_hook(lambda *_: None)
    output = model(**inputs)
    assert not isinstance(output, LazyLogits)
    close(output.loss, upstream(**inputs).loss, 1e-6)
    with pytest.raises(KernelError, match="the head has a hook"), loss_options(token_outputs=True):
        model(**inputs)


def test_a_hook_on_another_copy_is_no_matter(patched):
    models = with_trained_copies(pair(patched), "a", "b")
    models[1].lm_head.modules_to_save["b"].register_forward_hook(lambda *_: None)
    models[1].lm_head.original_module.register_forward_hook(lambda *_: None)
    assert_fused_as_upstream(*models)


def test_a_copy_that_is_no_plain_linear(patched):
    _, model = with_trained_copies(pair(patched), "a")

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.lm_head.modules_to_save["a"] = Doubled(32, 61)
    with pytest.raises(KernelError, match="the head is a Doubled"), loss_options(token_outputs=True):
        model(**batch())


def test_a_wrapper_that_does_something_else_is_asked_for_logits(patched):
    class Scaled(TrainedCopies):
        def forward(self, x):
            return 2 * self.original_module(x)

    upstream, model = pair(patched)
    for each in (upstream, model):
        each.lm_head = Scaled(each.lm_head, "a")
    inputs = batch()
    output = model(**inputs)
    assert not isinstance(output, LazyLogits)
    close(output.loss, upstream(**inputs).loss, 1e-6)


def test_logits_are_those_of_the_copy_of_the_forward(patched):
    upstream, model = with_trained_copies(pair(patched), "a", "b")
    inputs = batch()
    output = model(**inputs)
    model.lm_head.disable_adapters = True
    close(output.logits, upstream(**inputs).logits, 1e-5)


def test_logits_of_another_copy_are_not_taken_for_those_of_the_forward(patched):
    hooks = pytest.importorskip("accelerate.hooks")
    _, model = with_trained_copies(pair(patched), "a", "b")
    hooks.add_hook_to_module(model.lm_head.modules_to_save["a"], hooks.ModelHook())
    output = model(**batch())
    model.lm_head.disable_adapters = True
    with pytest.warns(VeomniHookWarning, match="the weights of the head have changed"):
        _ = output.logits


def test_what_is_no_wrapper():
    linear = nn.Linear(2, 3)
    other = nn.Module()
    other.modules_to_save = nn.ModuleDict({"a": linear})
    for module in (linear, other, None):
        assert called_by(module) is module
    assert still_called(other, linear)
    wrapper = TrainedCopies(linear, "a")
    assert called_by(wrapper) is wrapper.modules_to_save["a"]
    assert not still_called(wrapper, linear)
    assert heads.refuses(wrapper, called_by(wrapper)) is None


@pytest.mark.parametrize("state", ["trained", "another", "disabled"])
def test_with_peft(patched, state):
    peft = pytest.importorskip("peft")
    models = pair(patched)
    adapted = []
    for model in models:
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        torch.manual_seed(0)
        made = peft.get_peft_model(model, config)
        made.add_adapter("second", config)
        with torch.no_grad():
            for factor, each in enumerate(model.lm_head.modules_to_save.values(), 2):
                each.weight.mul_(factor)
        adapted.append(made.train())
    if state == "another":
        for each in adapted:
            each.set_adapter("second")
    if state != "disabled":
        assert_fused_as_upstream(*adapted)
        return
    inputs = batch()
    with adapted[0].disable_adapter(), adapted[1].disable_adapter():
        expected, output = (each(**inputs) for each in adapted)
    assert isinstance(output, LazyLogits)
    close(output.loss, expected.loss, 1e-5)
