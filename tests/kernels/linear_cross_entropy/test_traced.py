"""The loss under ``torch.compile``: one graph, upstream's numbers, logits as they are read."""

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.kernels import patched_qwen3
from tests.kernels.dispatched import compiled, targets
from tests.kernels.linear_cross_entropy.routed import held_logits
from tests.kernels.matching import DEVICE, close, grads_of
from tests.kernels.patched_qwen3 import pair
from veomni_hook.errors import KernelError, VeomniHookWarning
from veomni_hook.kernels.bind import bind
from veomni_hook.kernels.linear_cross_entropy.options import loss_options
from veomni_hook.kernels.linear_cross_entropy.traced import TracedLogits
from veomni_hook.kernels.selection.process_choice import set_choice

OP = "veomni_hook.linear_cross_entropy"

pytestmark = pytest.mark.usefixtures("anywhere")


@pytest.fixture(autouse=True)
def chosen():
    set_choice("linear_cross_entropy=torch")


@pytest.fixture
def models(patched):
    return moved(patched)


def moved(patched, **changes):
    return [each.to(DEVICE) for each in pair(patched, num_hidden_layers=0, **changes)]


def batch(rows=1, length=6, seed=0):
    torch.manual_seed(seed)
    return {name: each.to(DEVICE) for name, each in patched_qwen3.batch(rows, length).items()}


def stepped(model, run, inputs, **more):
    model.zero_grad()
    out = run(**inputs, use_cache=False, **more)
    out.loss.backward()
    return out, [parameter.grad.clone() for parameter in model.parameters()]


def assert_equal(found, expected):
    close(found[0].loss, expected[0].loss, 1e-5)
    close(found[1], expected[1], 1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["torch", "triton"])
# Inductor needs a C++ compiler, and half a minute.
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_with_upstreams_loss_and_gradients(models, backend, compiler):
    if backend == "triton":
        pytest.importorskip("triton")
    upstream, model = models
    set_choice(f"linear_cross_entropy={backend}")
    run, counter = compiled(model, compiler)
    for seed in range(2):
        inputs = batch(2, 7, seed=seed)
        found = stepped(model, run, inputs)
        assert_equal(found, stepped(upstream, upstream, inputs))
    assert counter.frame_count == 1
    assert any(OP in target for target in targets(counter)) == (backend == "triton")


@pytest.mark.slow
def test_auto_takes_the_kernel_where_it_beats_inductor(models):
    pytest.importorskip("triton")
    set_choice("auto")
    _, model = models
    run, counter = compiled(model)
    stepped(model, run, batch())
    assert any(OP in target for target in targets(counter))


@pytest.mark.slow
def test_lengths_that_change_are_compiled_twice_at_most(models):
    pytest.importorskip("triton")
    upstream, model = models
    set_choice("linear_cross_entropy=triton")
    run, counter = compiled(model)
    for length in (6, 9, 12, 17, 31):
        inputs = batch(1, length)
        assert_equal(stepped(model, run, inputs), stepped(upstream, upstream, inputs))
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_keywords_of_the_loss(models):
    upstream, model = models
    run, counter = compiled(model)
    inputs = batch(2, 6)
    more = {"num_items_in_batch": torch.tensor(5), "shift_labels": inputs["labels"].roll(-1, 1).contiguous()}
    assert_equal(stepped(model, run, inputs, **more), stepped(upstream, upstream, inputs, **more))
    assert "cross_entropy" not in str(targets(counter))


class TestLogits:
    @pytest.mark.slow
    def test_of_a_compiled_model_are_computed_when_they_are_read(self, models):
        upstream, model = models
        run, _ = compiled(model)
        inputs = batch()
        out, expected = run(**inputs, use_cache=False), upstream(**inputs, use_cache=False)
        assert isinstance(out, CausalLMOutputWithPast)
        assert isinstance(held_logits(out), TracedLogits)
        assert list(out) == list(expected)
        close(out.logits, expected.logits, 1e-5)
        assert out["logits"] is out.logits
        assert not isinstance(held_logits(out), TracedLogits)

    def test_have_gradients(self, models):
        found = []
        for model, run in ((models[0], models[0]), (models[1], compiled(models[1])[0])):
            out = run(**batch(), use_cache=False)
            (out.loss + out.logits.square().mean()).backward()
            found.append([parameter.grad for parameter in model.parameters()])
        close(found[1], found[0], 1e-4)

    @pytest.mark.slow
    def test_that_compiled_code_reads_are_a_part_of_its_graph(self, models):
        found = []
        for model in models:

            def step(inputs, model=model):
                out = model(**inputs, use_cache=False)
                return out.loss + out.logits.square().mean(), out["logits"].argmax(-1)

            run = step if model is models[0] else compiled(step)[0]
            loss, tokens = run(batch())
            loss.backward()
            found.append((loss, tokens, [parameter.grad for parameter in model.parameters()]))
        close(found[1][0], found[0][0], 1e-5)
        assert torch.equal(found[1][1], found[0][1])
        close(found[1][2], found[0][2], 1e-4)

    def test_that_nobody_reads_are_not_in_the_graph(self, models):
        _, model = models
        step, counter = compiled(lambda inputs: model(**inputs, use_cache=False).loss, "eager")
        step(batch()).backward()
        # The head's product with all rows would be a linear of vocab_size features.
        for graph in counter.graphs:
            for node in graph.graph.nodes:
                value = node.meta.get("example_value")
                assert not (isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[-1] == 61)

    @pytest.mark.slow
    def test_of_tuples(self, models):
        upstream, model = models
        run, _ = compiled(model, "eager")
        inputs = batch()
        found, expected = (each(**inputs, use_cache=False, return_dict=False) for each in (run, upstream))
        assert len(found) == len(expected)
        close(found, expected, 1e-5)

    @pytest.mark.slow
    def test_read_after_a_step_of_the_optimizer_warn(self, models):
        _, model = models
        run, _ = compiled(model, "eager")
        out = run(**batch(), use_cache=False)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        with pytest.warns(VeomniHookWarning, match="the weights of the head have changed"):
            assert out.logits.shape == (1, 6, 61)


class Loss(nn.Module):
    """A callable that is no function."""

    def forward(self, logits, labels, **kwargs):
        return logits.sum() * 0 + 4


class Thrice(nn.Linear):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 3


def with_head_of_another_class(model):
    weight = model.lm_head.weight
    model.lm_head = Thrice(weight.shape[1], weight.shape[0], bias=False)
    model.lm_head.weight = weight


def doubled(module, args, result):
    return result * 2


#: What is done to a model, and by what its logits are multiplied, or its loss.
UPSTREAMS = {
    "evaluation": (lambda model: model.eval(), 1, None),
    "without gradients": (lambda model: None, 1, None),
    "a loss of its own": (
        lambda model: setattr(model, "loss_function", lambda logits, **_: logits.sum() * 0 + 3),
        1,
        3,
    ),
    "a callable that is no function": (lambda model: setattr(model, "_loss_function", Loss()), 1, 4),
    "a head that is watched": (lambda model: model.lm_head.register_forward_hook(doubled), 2, None),
    "a head of another class": (with_head_of_another_class, 3, None),
    "bound to eager": (lambda model: bind(model, "eager"), 1, None),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", UPSTREAMS)
def test_calls_that_upstream_computes_in_one_graph(models, name):
    change, factor, loss = UPSTREAMS[name]
    upstream, model = models
    change(model)
    run, counter = compiled(model, "eager")
    with torch.set_grad_enabled(name != "without gradients"):
        out = run(**batch(), use_cache=False)
    assert counter.frame_count == 1
    assert isinstance(out.logits, torch.Tensor) and type(out) is CausalLMOutputWithPast
    close(out.logits, upstream(**batch()).logits * factor, 1e-5)
    assert loss is None or out.loss == loss


class TestLossOptions:
    def test_that_change_the_loss_are_an_error(self, models):
        run, _ = compiled(models[1], "eager")
        with pytest.raises(KernelError, match="label_smoothing had no effect"):
            with loss_options(label_smoothing=0.1):
                run(**batch(), use_cache=False)

    @pytest.mark.slow
    def test_after_the_model_was_compiled_without(self, models):
        run, counter = compiled(models[1], "eager")
        run(**batch(), use_cache=False)
        with pytest.raises(KernelError, match="z_loss had no effect"):
            with loss_options(z_loss=0.1):
                run(**batch(), use_cache=False)
        run(**batch(), use_cache=False)
        assert counter.frame_count == 2


@pytest.mark.slow
def test_autocast(models):
    found = []
    for model, run in ((models[0], models[0]), (models[1], compiled(models[1])[0])):
        with torch.autocast(DEVICE, torch.bfloat16):
            out = run(**batch(), use_cache=False)
        out.loss.backward()
        found.append((out.loss, model.lm_head.weight.grad, out.logits))
    for got, wanted in zip(found[1], found[0], strict=True):
        assert got.dtype is wanted.dtype
        close(got, wanted, 3e-2)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["lm_head.", "model."])
def test_frozen_parts_get_no_gradient(models, frozen):
    pytest.importorskip("triton")
    set_choice("linear_cross_entropy=triton")
    inputs, found = batch(), []
    for model, run in ((models[0], models[0]), (models[1], compiled(models[1])[0])):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        run(**inputs, use_cache=False).loss.backward()
        found.append(grads_of(model))
    close(*found[::-1], 1e-4)


@pytest.mark.slow
def test_tied_weights(patched):
    upstream, model = moved(patched, tie_word_embeddings=True)
    inputs = batch()
    assert_equal(stepped(model, compiled(model)[0], inputs), stepped(upstream, upstream, inputs))


def test_logits_of_released_weights_are_computed_with_those_of_now(models):
    """As FSDP leaves it: the memory of a gathered weight is gone, its numbers are the module's."""
    upstream, model = models
    run, _ = compiled(model)
    out, _ = stepped(model, run, batch())
    gathered = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(gathered.detach().clone())
    gathered.untyped_storage().resize_(0)
    close(out.logits, upstream(**batch(), use_cache=False).logits, 1e-5)
