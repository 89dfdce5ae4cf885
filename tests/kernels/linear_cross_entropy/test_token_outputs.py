"""Log-probabilities, entropy and accuracy as fields of outputs, against upstream's logits."""

import copy
import pickle
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors
from torch.nn import functional
from torch.nn.parallel.distributed import _find_tensors
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.kernels.linear_cross_entropy.objectives import OBJECTIVES, operands
from tests.kernels.linear_cross_entropy.routed import (
    as_library,
    batch,
    held_logits,
    load,
    of_experts,
    own_loss,
    pair,
    twins,
    with_decoder,
)
from tests.kernels.linear_cross_entropy.test_backends import backend_of
from tests.kernels.matching import DEVICE, assert_matches, close, grads_of
from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy import losses, reference, token_outputs
from veomni_hook.kernels.linear_cross_entropy import torch as chunked
from veomni_hook.kernels.linear_cross_entropy.deferred import DeferredLogits
from veomni_hook.kernels.linear_cross_entropy.functional import token_log_probs
from veomni_hook.kernels.linear_cross_entropy.objective import Wanted
from veomni_hook.kernels.linear_cross_entropy.options import TOKEN_OUTPUTS, loss_options
from veomni_hook.kernels.linear_cross_entropy.output import LazyLogits
from veomni_hook.kernels.selection.process_choice import set_choice


@pytest.fixture(autouse=True)
def named():
    set_choice("linear_cross_entropy=torch")


def of_logits(logits, target, temperature=1.0, ignored=-100):
    """What the fields are by definition; ``target`` is the label that each position predicts."""
    every, counts = (logits.float() / temperature).log_softmax(-1), target != ignored
    return {
        "log_probs": every.gather(-1, target.where(counts, 0)[..., None])[..., 0].where(counts, 0),
        "entropy": -(every.exp() * every).sum(-1).where(counts, 0),
        "token_accuracy": ((every.argmax(-1) == target) & counts).float(),
    }


def predicted(labels):
    return functional.pad(labels, (0, 1), value=-100)[..., 1:]


def objective_of(found, loss=0.0):
    """A number that depends on each position of each field differently, like a policy gradient."""
    advantages = torch.linspace(-1, 1, found["log_probs"].numel()).reshape(found["log_probs"].shape)
    ratio = (found["log_probs"] - found["log_probs"].detach()).exp()
    return (ratio * advantages).sum() - 0.1 * (found["entropy"] * advantages.square()).sum() + loss


def assert_same(upstream, model, expected, output, *, gradients=True, loss=True):
    """Compare the fields with ``expected``, and the gradients of a loss of them."""
    for name in TOKEN_OUTPUTS:
        value = getattr(output, name)
        assert value.dtype is torch.float32 and output[name] is value
        close(value.detach(), expected[name].detach(), 1e-5)
    if not gradients:
        return
    assert not output.token_accuracy.requires_grad
    objective_of(expected, expected["loss"] if loss else 0.0).backward()
    objective_of(output, output.loss if loss else 0.0).backward()
    for (name, wanted), got in zip(upstream.named_parameters(), model.parameters(), strict=True):
        # A tower that gets no image has no gradient.
        assert (wanted.grad is None) is (got.grad is None) is ("visual" in name)
        if wanted.grad is not None:
            close(got.grad, wanted.grad, 1e-5)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("loss", [True, False], ids=["with the loss", "alone"])
def test_fields_and_gradients_are_those_of_upstreams_logits(patched, backend, temperature, loss):
    set_choice(f"linear_cross_entropy={backend}")
    upstream, model = pair(patched)
    inputs = batch()
    logits = upstream(inputs["input_ids"]).logits / temperature
    expected = of_logits(logits, predicted(inputs["labels"]))
    expected["loss"] = upstream.loss_function(logits, inputs["labels"], 61)
    with loss_options(token_outputs=True, temperature=temperature):
        output = model(**inputs)
    assert isinstance(held_logits(output), DeferredLogits)
    close(output.loss.detach(), expected["loss"].detach(), 1e-5)
    assert_same(upstream, model, expected, output, loss=loss)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_the_loss_with_every_option(patched, temperature):
    upstream, model = pair(patched)
    inputs, weights = batch(), torch.rand(2, 12)
    logits = upstream(inputs["input_ids"]).logits.float() / temperature
    target = predicted(inputs["labels"])
    losses = functional.cross_entropy(logits.transpose(1, 2), target, label_smoothing=0.2, reduction="none")
    losses = losses + 0.1 * logits.logsumexp(-1).square().where(target != -100, 0)
    expected = of_logits(logits, target)
    expected["loss"] = (losses * functional.pad(weights, (0, 1))[:, 1:]).sum() / 7
    options = {"label_smoothing": 0.2, "z_loss": 0.1, "loss_weights": weights, "temperature": temperature}
    with loss_options(token_outputs=True, **options):
        output = model(**inputs, num_items_in_batch=7)
    close(output.loss.detach(), expected["loss"].detach(), 1e-5)
    assert_same(upstream, model, expected, output)


@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": torch.tensor([5])}], ids=["mean", "sum"])
def test_weights_of_tokens(patched, given):
    _, model = pair(patched)
    inputs, weights = batch(), torch.rand(2, 12)
    with loss_options(loss_weights=weights):
        expected = model(**inputs, **given).loss
    with loss_options(loss_weights=weights, token_outputs=True):
        output = model(**inputs, **given)
    close(output.loss, expected, 1e-6)
    counts = (functional.pad(weights, (0, 1))[:, 1:] * (predicted(inputs["labels"]) != -100)).sum()
    by_hand = -(output.log_probs * functional.pad(weights, (0, 1))[:, 1:]).sum()
    assert output.loss.shape == expected.shape
    close(output.loss.squeeze(), by_hand / (5 if given else counts), 1e-5)


def test_the_config_asks_for_every_call(patched):
    upstream, model = pair(patched)
    model.config.token_outputs = True
    inputs = batch()
    target = inputs["labels"].roll(-1, 1).contiguous()
    expected = of_logits(upstream(inputs["input_ids"]).logits, target)
    expected["loss"] = upstream(**inputs, shift_labels=target).loss
    assert_same(upstream, model, expected, model(**inputs, shift_labels=target))
    with loss_options(token_outputs=("entropy",), entropy=True, predictions=True) as report:
        output = model(**inputs)
    assert list(output)[-1] == "entropy" and not hasattr(output, "log_probs")
    assert torch.equal(report.entropy, output.entropy) and not report.entropy.requires_grad
    assert report.predictions.dtype is torch.int64
    model.config.token_outputs = False
    assert not hasattr(model(**inputs), "entropy")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_in_evaluation(patched, context):
    upstream, model = (each.eval() for each in pair(patched))
    inputs = batch()
    with context():
        logits = upstream(inputs["input_ids"]).logits
        model(inputs["input_ids"]).logits.sum()
        with loss_options(token_outputs=True):
            _ = model(**inputs).logits  # reading them has no effect on what is asked for by name
            output = model(**inputs)
        assert_same(upstream, model, of_logits(logits, predicted(inputs["labels"])), output, gradients=False)
        close(output.logits, logits, 1e-5)
    assert output.log_probs.requires_grad is (context is torch.enable_grad)


def test_packed_and_padded_samples_have_the_numbers_of_single_ones(patched):
    _, model = pair(patched)
    model.config.token_outputs = True
    samples = [torch.randint(0, 61, (1, length)) for length in (5, 7)]
    alone = [model(input_ids=each, labels=each) for each in samples]
    ids = torch.cat(samples, 1)
    labels = ids.clone()
    labels[0, 5] = -100
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(input_ids=ids, labels=labels, position_ids=positions, use_cache=False)
    short = functional.pad(samples[0], (0, 2), value=3)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, 5:] = 0
    both = torch.cat([short, samples[1]])
    padded = model(input_ids=both, labels=both.where(mask == 1, -100), attention_mask=mask)
    for name in TOKEN_OUTPUTS:
        expected = [getattr(each, name)[0] for each in alone]
        close(getattr(packed, name)[0], torch.cat(expected), 1e-5)
        close(getattr(padded, name)[1], expected[1], 1e-5)
        close(getattr(padded, name)[0], functional.pad(expected[0], (0, 2)), 1e-5)
    weights = [each.log_probs.shape[1] - 1 for each in alone]
    mean = sum(each.loss * weight for each, weight in zip(alone, weights, strict=True)) / sum(weights)
    close(packed.loss, mean, 1e-5)
    close(padded.loss, mean, 1e-5)


def test_no_label_counts(patched):
    upstream, model = pair(patched)
    inputs = {"input_ids": batch()["input_ids"], "labels": torch.full((2, 12), -100)}
    with loss_options(token_outputs=True):
        output = model(**inputs)
    assert output.loss.isnan() and upstream(**inputs).loss.isnan()
    (output.loss + output.log_probs.sum()).backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("autocast", [True, False])
def test_in_bfloat16(patched, autocast, monkeypatch):
    monkeypatch.setattr(
        losses, "_trusted", WeakKeyDictionary()
    )  # the loss function is examined under autocast
    upstream, model = pair(patched)
    inputs = batch()
    for each in () if autocast else (upstream, model):
        each.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = of_logits(upstream(inputs["input_ids"]).logits, predicted(inputs["labels"]))
        with loss_options(token_outputs=True):
            output = model(**inputs)
    assert output.log_probs.dtype is output.loss.dtype is torch.float32
    close(output.log_probs.detach(), expected["log_probs"].detach(), 2e-2)
    for numbers in (expected, output):
        objective_of(numbers).backward()
    for wanted, got in zip(upstream.parameters(), model.parameters(), strict=True):
        assert got.grad.dtype is wanted.grad.dtype
        close(got.grad, wanted.grad, 5e-2)


@pytest.mark.parametrize("trained", ["lm_head", "model"])
def test_a_part_of_the_model_is_trained(patched, trained):
    upstream, model = pair(patched)
    inputs, grads = batch(), []
    for each in (upstream, model):
        each.requires_grad_(requires_grad=False)
        getattr(each, trained).requires_grad_()
    with loss_options(token_outputs=True):
        found = model(**inputs)
    expected = of_logits(upstream(inputs["input_ids"]).logits, predicted(inputs["labels"]))
    for each, numbers in ((upstream, expected), (model, found)):
        objective_of(numbers).backward()
        grads.append(grads_of(each))
    close(*grads[::-1], 1e-5)


def test_with_a_value_head(patched):
    """A policy and a value from one pass: the value's head reads the hidden states of the output."""
    upstream, model = pair(patched)
    inputs, value = batch(), nn.Linear(32, 1)
    with loss_options(token_outputs=True):
        output = model(**inputs, output_hidden_states=True)
    reference = upstream(inputs["input_ids"], output_hidden_states=True)
    expected = of_logits(reference.logits, predicted(inputs["labels"]))
    expected["loss"] = value(reference.hidden_states[-1]).square().mean()
    output.loss = value(output.hidden_states[-1]).square().mean()
    close(output.loss.detach(), expected["loss"].detach(), 1e-5)
    assert_same(upstream, model, expected, output)
    with pytest.raises(KernelError, match="output_hidden_states=True"):
        token_log_probs(model(inputs["input_ids"]), model.lm_head.weight, inputs["labels"])
    later = upstream(inputs["input_ids"], output_hidden_states=True)
    found = token_log_probs(later, upstream.lm_head.weight, predicted(inputs["labels"]), 0.7)
    close(found.log_probs, of_logits(later.logits, predicted(inputs["labels"]), 0.7)["log_probs"], 1e-5)
    hidden = upstream.model(inputs["input_ids"])
    again = token_log_probs(hidden, upstream.lm_head.weight, predicted(inputs["labels"]), 0.7)
    close(again.log_probs, found.log_probs, 1e-6)


WALKER = "torch.distributed.fsdp.a_test"


class TestOutputs:
    @pytest.fixture
    def output(self, patched):
        _, model = pair(patched)
        with loss_options(token_outputs=True):
            return model(**batch(), use_cache=False)

    def test_are_the_models_own_class_with_more_fields(self, output):
        assert isinstance(output, CausalLMOutputWithPast) and is_dataclass(output)
        assert type(output).__name__ == "CausalLMOutputWithPast"
        assert tuple(field.name for field in fields(output))[-3:] == TOKEN_OUTPUTS
        assert list(output) == ["loss", "logits", *TOKEN_OUTPUTS]
        assert isinstance(held_logits(output), DeferredLogits)
        assert "token_accuracy=" in repr(output)

    def test_tuples_have_the_fields_last(self, patched, output):
        assert all(
            a is getattr(output, n) for a, n in zip(output.to_tuple()[-3:], TOKEN_OUTPUTS, strict=True)
        )
        assert output[-1] is output.token_accuracy
        _, model = pair(patched)
        with loss_options(token_outputs=True):
            found = model(**batch(), use_cache=False, return_dict=False)
        assert type(found) is tuple and [each.shape for each in found[2:]] == [(2, 12)] * 3

    @pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_are_copied_and_pickled(self, patched, through):
        _, model = pair(patched)
        with torch.no_grad(), loss_options(token_outputs=True):
            output = model(**batch(), use_cache=False)
        made = through(output)
        assert type(made) is type(output) and list(made) == list(output)
        for name, value in output.items():
            assert torch.equal(made[name], value) and made[name] is getattr(made, name)

    def test_wrappers_find_the_fields(self, output):
        tensors = [output.loss, *(output[name] for name in TOKEN_OUTPUTS)]
        leaves = as_library(WALKER, "def run(output):\n    return pytree.tree_leaves(output)")
        double = as_library(WALKER, "def run(output):\n    return pytree.tree_map(lambda x: x * 2, output)")
        for found in (leaves(output), list(_find_tensors(output))):
            assert {id(each) for each in tensors} <= {id(each) for each in found}
        for mapped in (double(output), _apply_to_tensors(lambda x: x * 2, output)):
            assert isinstance(mapped, OrderedDict)
            assert torch.equal(mapped["entropy"], 2 * output.entropy)
        assert isinstance(held_logits(output), DeferredLogits), "a wrapper read the logits"

    def test_may_be_changed_in_place(self, output):
        # FSDP2 loses its hook where a view is changed in place.
        assert not any(output[name]._is_view() for name in ("loss", *TOKEN_OUTPUTS))
        product = output.log_probs * output.entropy
        output.loss /= 4
        output.log_probs.clamp(min=-1).sum().backward(retain_graph=True)
        product.sum().backward()


def test_logits_are_the_models_own_at_any_temperature(patched):
    upstream, model = pair(patched)
    inputs = batch()
    with loss_options(temperature=0.5):
        output = model(**inputs)
    logits = upstream(inputs["input_ids"]).logits
    close(output.loss, upstream.loss_function(logits * 2, inputs["labels"], 61), 1e-5)
    close(output.logits, logits, 1e-5)


def test_what_only_upstream_can_compute_is_an_error(patched):
    _, model = pair(patched)
    model.loss_function = own_loss
    with pytest.raises(KernelError, match=r"token_outputs are not available.*own_loss"):
        with loss_options(token_outputs=True):
            model(**batch())
    with pytest.raises(KernelError, match=r"temperature is not available.*own_loss"):
        with loss_options(temperature=2.0):
            model(**batch())
    model.config.token_outputs = True
    with pytest.raises(KernelError, match=r"there is no log_probs, .*own_loss"):
        model(**batch())
    _, model = with_decoder(pair(patched), after=lambda logits: logits * 2)
    model.config.token_outputs = True
    with pytest.raises(KernelError, match="the head returns"):
        model(**batch())


def test_no_labels_no_fields(patched):
    _, model = pair(patched)
    with pytest.raises(KernelError, match=r"token_outputs had no effect[^$]*`labels`[^$]*veomni-hook list"):
        with loss_options(token_outputs=True):
            model(batch()["input_ids"])


def test_a_head_around_its_linear(patched):
    upstream, model = with_decoder(pair(patched))
    inputs = batch()
    expected = of_logits(upstream(inputs["input_ids"]).logits, predicted(inputs["labels"]))
    with loss_options(token_outputs=True):
        output = model(**inputs)
    assert_same(upstream, model, expected, output, loss=False)


@pytest.mark.parametrize("value", ["log_probs", ("log_probs", "logits"), 1, {"entropy": True}])
def test_names_that_are_not_valid(patched, value):
    _, model = pair(patched)
    with pytest.raises(KernelError, match="token_outputs is"), loss_options(token_outputs=value):
        pass
    model.config.token_outputs = value
    with pytest.raises(KernelError, match=r"Qwen3ForCausalLM\.config"):
        model(**batch())


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "1", None, True, torch.tensor(0.5)])
def test_temperatures_that_are_not_valid(value):
    kind = "Python number[^$]*not a tensor" if isinstance(value, torch.Tensor) else "positive number"
    with pytest.raises(KernelError, match=f"temperature is .*{kind}"), loss_options(temperature=value):
        pass
    with pytest.raises(KernelError, match=r"temperature is[^$]*where: token_log_probs"):
        token_log_probs(torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, dtype=torch.int64), value)


def test_auto_takes_what_upstream_would_be_faster_at(patched):
    set_choice("auto")
    _, model = pair(patched)
    model.config.token_outputs = True
    assert isinstance(model.eval()(**batch()), LazyLogits)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["torch", "auto"])
@pytest.mark.parametrize("mode", ["train", pytest.param("eval", marks=pytest.mark.slow)])
def test_compiled(patched, mode, choice):
    set_choice(choice)
    upstream, model = (getattr(each, mode)() for each in pair(patched))
    model.config.token_outputs = True
    inputs = batch()
    expected = of_logits(upstream(inputs["input_ids"]).logits, predicted(inputs["labels"]))
    expected["loss"] = upstream(**inputs).loss
    torch.compiler.reset()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs, use_cache=False)
    assert list(output) == ["loss", "logits", *TOKEN_OUTPUTS]
    assert_same(upstream, model, expected, output)
    assert output.to_tuple()[-1].shape == (2, 12)


@pytest.mark.slow
def test_compiled_code_that_cannot_have_the_fields(patched):
    _, model = pair(patched)
    model.config.token_outputs = True
    torch.compiler.reset()
    run = torch.compile(model, backend="eager")
    with pytest.raises(KernelError, match=r"compiled code cannot report"), loss_options(temperature=0.5):
        run(**batch())
    model.loss_function = own_loss
    with pytest.raises(KernelError, match=r"there is no log_probs.*own"):
        run(**batch())


def test_an_output_of_experts(tmp_path_factory):
    upstream, model = of_experts(tmp_path_factory.mktemp("moe"))
    inputs = {**batch(), "output_router_logits": True, "use_cache": False}
    reference = upstream(**inputs)
    expected = of_logits(reference.logits, predicted(inputs["labels"]))
    with loss_options(token_outputs=True):
        output = model(**inputs)
    close(output.aux_loss, reference.aux_loss, 1e-5)
    assert list(output) == [*reference, *TOKEN_OUTPUTS]
    assert_same(upstream, model, {**expected, "loss": reference.loss}, output)


def test_conditional_generation(tmp_path_factory):
    from tests.multimodal.families import FAMILIES

    module = load(tmp_path_factory.mktemp("vl"), "transformers.models.qwen2_vl.modeling_qwen2_vl")
    name, sizes = FAMILIES["qwen2_vl"]
    config = getattr(module, f"{name}Config")(**sizes)
    upstream, model = twins(module, f"{name}ForConditionalGeneration", config)
    inputs = {**batch(), "use_cache": False}
    reference = upstream(**inputs)
    expected = of_logits(reference.logits, predicted(inputs["labels"]))
    with loss_options(token_outputs=True):
        output = model(**inputs)
    assert list(output) == [*reference, *TOKEN_OUTPUTS]
    close(output.loss, reference.loss, 1e-5)
    assert_same(upstream, model, {**expected, "loss": reference.loss}, output)


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("backend", [chunked, reference], ids=["torch", "reference"])
def test_capped_logits_are_divided_after_the_cap(backend, temperature):
    given, target = operands(torch.float32)

    def ours(x, weight, bias):
        found = token_log_probs(
            x, weight, target, temperature, bias=bias, scale=0.7, softcap=3.0, entropy=True,
            backend=backend.__name__.rpartition(".")[2],
        )  # fmt: skip
        return found.log_probs, found.entropy

    def expected(x, weight, bias):
        logits = 3 * torch.tanh(functional.linear(x.double(), weight.double(), bias.double()) * 0.7 / 3)
        every = (logits / temperature).log_softmax(-1)
        counts = target != -100
        log_probs = every.gather(-1, target.where(counts, 0)[..., None])[..., 0].where(counts, 0)
        entropy = -(every.exp() * every).sum(-1).where(counts, 0)
        return log_probs.float(), entropy.float()

    assert_matches(ours, expected, given, tolerance=1e-5)


def packed_by(module, target, objective, names=TOKEN_OUTPUTS, group=None):
    def call(x, weight, bias=None):
        wanted = token_outputs.wanted_for(names, Wanted())
        given = (x, weight, bias, target.where(target != -100, objective.ignore_index), objective)
        vector, _ = token_outputs.packed(
            module.loss_and_statistics, module.token_statistics, given, wanted, names, group
        )
        return tuple(vector.split([1, *[len(target)] * len(names)]))

    return call


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_its_loss(name):
    given, target = operands(torch.float32)
    objective = OBJECTIVES[name]("cpu")

    def expected(x, weight, bias):
        call = (x, weight, bias, target.where(target != -100, objective.ignore_index), objective)
        loss, _ = reference.loss_and_statistics(*call, Wanted())
        found = reference.token_statistics(*call, Wanted(True, True, True))
        hits = (found.predictions == call[3]) & (call[3] != objective.ignore_index)
        return loss.reshape(1), found.log_probs, found.entropy, hits.float()

    assert_matches(packed_by(chunked, target, objective), expected, given, tolerance=1e-5)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_by_triton(name, request):
    kernels = backend_of("triton", request)
    given, target = operands(torch.float32, DEVICE)
    objective = OBJECTIVES[name](DEVICE)
    sides = [packed_by(module, target, objective) for module in (kernels, reference)]
    assert_matches(*sides, given, tolerance=1e-5)


def test_a_vocabulary_of_more_than_a_quarter_of_a_million():
    rows, vocab = 6, 262_208
    x, weight = torch.randn(rows, 4), torch.randn(vocab, 4)
    target = torch.randint(vocab - 100, vocab, (rows,))
    target[2] = -100

    def ours(x, weight):
        return packed_by(chunked, target, OBJECTIVES["plain"]("cpu"))(x, weight)

    def expected(x, weight):
        found = of_logits(x @ weight.T, target)
        loss = functional.cross_entropy(x @ weight.T, target)
        return loss.reshape(1), *found.values()

    # A sum of n numbers of random signs, one by one, is off by sqrt(n) roundings; both sides are such sums.
    assert_matches(ours, expected, [x, weight], tolerance=4 * vocab**0.5 * 2**-24)
