import gc
import threading
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.nn import functional

from tests.kernels.linear_cross_entropy.routed import batch, own_loss, pair, with_decoder
from tests.kernels.matching import close
from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy.options import active, loss_options
from veomni_hook.kernels.linear_cross_entropy.output import LazyLogits
from veomni_hook.kernels.selection.process_choice import set_choice


@pytest.fixture(autouse=True, params=["torch", "reference"])
def backend(request):
    set_choice(f"linear_cross_entropy={request.param}")
    return request.param


def shifted(values, filled):
    return functional.pad(values, (0, 1), value=filled)[..., 1:]


def test_options_change_the_loss(patched):
    upstream, model = pair(patched)
    inputs = batch()
    weights = torch.rand(2, 12)
    logits = upstream(inputs["input_ids"]).logits.float()
    target, kept = shifted(inputs["labels"], -100), shifted(weights, 0)
    counts = kept.where(target != -100, 0)
    losses = functional.cross_entropy(
        logits.transpose(1, 2), target, label_smoothing=0.2, reduction="none"
    ) + 0.1 * logits.logsumexp(-1).square().where(target != -100, 0)
    expected = (counts * losses).sum()
    options = {"label_smoothing": 0.2, "z_loss": 0.1, "loss_weights": weights}
    with loss_options(**options):
        loss = model(**inputs).loss
        close(loss, expected / counts.sum(), 1e-5)
        close(model(**inputs, num_items_in_batch=7).loss, expected / 7, 1e-5)
        given = model(**inputs, shift_labels=target.contiguous()).loss
    loss.backward()
    assert model.lm_head.weight.grad is not None
    counts = weights.where(target != -100, 0)
    close(given, (counts * losses).sum() / counts.sum(), 1e-5)
    close(model(**inputs).loss, upstream(**inputs).loss, 1e-5)


def test_a_report_speaks_of_the_labels_that_positions_predict(patched):
    upstream, model = pair(patched)
    inputs = batch()
    with loss_options(log_probs=True, entropy=True, predictions=True) as report:
        model(**inputs).loss.backward()
    every = upstream(inputs["input_ids"]).logits.float().log_softmax(-1)
    target = shifted(inputs["labels"], -100)
    counts = target != -100
    close(report.log_probs, every.gather(-1, target.clamp(min=0)[..., None])[..., 0].where(counts, 0), 1e-5)
    close(report.entropy, -(every.exp() * every).sum(-1).where(counts, 0), 1e-5)
    assert torch.equal(report.predictions, every.argmax(-1).where(counts, -100))
    hits = (every.argmax(-1) == target)[counts].float()
    close(report.accuracy, hits.mean(), 1e-6)
    assert report.log_probs.shape == (2, 12) and not report.log_probs.requires_grad


def test_accuracy_of_labels_that_are_right(patched):
    upstream, model = pair(patched)
    inputs = batch()
    best = upstream(inputs["input_ids"]).logits.argmax(-1)
    best[0] = (best[0] + 1) % 61
    with loss_options(predictions=True) as report:
        model(**inputs, shift_labels=best)
        assert report.accuracy.item() == 0.5
        with pytest.raises(KernelError, match="no log_probs: it was not requested"):
            _ = report.log_probs


@pytest.mark.parametrize("grad", [True, False])
def test_in_evaluation_on_request(patched, grad, backend):
    upstream, model = (each.eval() for each in pair(patched))
    inputs = batch()
    with torch.set_grad_enabled(grad), loss_options(predictions=True, evaluation=True) as report:
        output = model(**inputs)
    assert isinstance(output, LazyLogits) and report.accuracy.shape == ()
    close(output.loss, upstream(**inputs).loss, 1e-5)
    assert output.loss.requires_grad is grad
    if backend == "torch":
        with loss_options(predictions=True) as report:
            assert not isinstance(model(**inputs), LazyLogits)
        with pytest.raises(KernelError, match=r"eval mode[^$]*fix: +pass evaluation=True"):
            _ = report.accuracy


def test_logits_read_in_evaluation_leave_training_fused(patched, backend):
    _, model = pair(patched)
    inputs = batch()
    with torch.no_grad(), loss_options(evaluation=True):
        model.eval()
        assert model(**inputs).logits.clone().shape == (2, 12, 61)
        assert isinstance(model(**inputs), LazyLogits) is (backend == "reference")
    assert isinstance(model.train()(**inputs), LazyLogits)


@pytest.mark.parametrize("option", [{"temperature": 0.5}, {"temperature": 0.5, "z_loss": 0.1}])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_what_to_do_about_evaluation(patched, option, mode, backend):
    if backend == "reference":
        return  # runs there, too
    _, model = pair(patched)
    are = "is" if len(option) == 1 else "are"
    with (
        torch.no_grad(),
        pytest.raises(KernelError, match=rf" {are} not available[^$]*fix: +pass evaluation=True"),
        loss_options(**option),
    ):
        getattr(model, mode)()(**batch())


def test_what_to_do_about_logits_that_were_read(patched, backend):
    if backend == "reference":
        return  # the loss is computed all the same
    model = pair(patched)[1].eval()
    for match in ("^$", "fix: +do not read outputs.logits of this model, or pass token_outputs=True"):
        with torch.no_grad(), loss_options(predictions=True, evaluation=True) as report:
            output = model(**batch())
        if match == "^$":
            assert report.accuracy.shape == () and output.logits.clone().shape == (2, 12, 61)
            continue
        with pytest.raises(KernelError, match=match):
            _ = report.accuracy
    with torch.no_grad(), loss_options(token_outputs=True, predictions=True) as report:
        model(**batch())
    assert report.accuracy.shape == ()


def test_what_to_do_about_what_was_not_requested(patched):
    _, model = pair(patched)
    with loss_options() as report:
        with pytest.raises(KernelError, match=r"no accuracy: no model[^$]*fix: +pass `labels`"):
            _ = report.accuracy
        model(**batch())
    with pytest.raises(KernelError, match=r"no accuracy: it was not[^$]*fix: +pass predictions=True$"):
        _ = report.accuracy


@pytest.mark.parametrize("option", ["label_smoothing", "z_loss", "loss_weights"])
def test_a_loss_that_only_upstream_can_compute_is_an_error(patched, option):
    _, model = pair(patched)
    model.loss_function = own_loss
    value = torch.rand(2, 12) if option == "loss_weights" else 0.1
    are = "are" if option == "loss_weights" else "is"
    with (
        pytest.raises(KernelError, match=f"{option} {are} not available.*own_loss"),
        loss_options(**{option: value}),
    ):
        model(**batch())
    with loss_options(log_probs=True) as report:
        model(**batch())
    with pytest.raises(KernelError, match="own_loss"):
        _ = report.log_probs


def test_a_head_that_turns_the_request_down(patched):
    _, model = with_decoder(pair(patched), after=lambda logits: logits * 2)
    with pytest.raises(KernelError, match="the head returns"), loss_options(z_loss=0.1):
        model(**batch())


def test_options_that_nobody_took(patched):
    upstream, model = pair(patched)
    with (
        pytest.raises(KernelError, match="label_smoothing, z_loss had no effect"),
        loss_options(label_smoothing=0.1, z_loss=0.1),
    ):
        upstream(**batch())
    set_choice("linear_cross_entropy=eager")
    with pytest.raises(KernelError, match=r"z_loss is not available.*eager is chosen"):
        with loss_options(z_loss=0.1):
            model(**batch())
    with loss_options(log_probs=True) as report:
        model(**batch())
    with pytest.raises(KernelError, match="eager is chosen"):
        _ = report.log_probs


def test_auto_takes_what_upstream_would_be_faster_at(patched):
    set_choice("auto")
    _, model = pair(patched)
    inputs = batch()
    assert not isinstance(model(**inputs), LazyLogits)
    with loss_options(log_probs=True) as report:
        model(**inputs)
    assert report.log_probs.shape == (2, 12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"label_smoothing": 1.5}, "between 0 and 1"),
        ({"z_loss": torch.ones(())}, "z_loss is a Tensor"),
        ({"accumulate": "bfloat16"}, "'bfloat16'"),
        ({"loss_weights": torch.ones(2, dtype=torch.int64)}, "loss_weights"),
        ({"loss_weights": torch.ones(2, requires_grad=True)}, "loss_weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_values_that_are_not_valid(options, reason):
    with pytest.raises(KernelError, match=reason), loss_options(**options):
        pass
    assert active() is None


def test_weights_of_another_shape(patched):
    _, model = pair(patched)
    with (
        pytest.raises(KernelError, match="loss_weights have the shape"),
        loss_options(loss_weights=torch.ones(2, 3)),
    ):
        model(**batch())


def test_blocks_are_left_as_they_were_entered(patched):
    with loss_options(log_probs=True) as outer:
        with loss_options(entropy=True):
            pass
        assert active().report is outer
        with pytest.raises(ZeroDivisionError), loss_options(z_loss=1.0):
            _ = 1 / 0
        assert active().report is outer
    assert active() is None


OPTIONS = [
    {"label_smoothing": 0.3, "evaluation": True},
    {"temperature": 0.5, "token_outputs": True},
    {},
]


def gradients_of(model, inputs, checkpointed, run):
    """The gradients of a step for each of OPTIONS; the blocks have ended when the backward passes begin."""
    losses, gradients = [], []
    for options in OPTIONS:
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        with loss_options(**options) if options else nullcontext():
            losses.append(
                checkpointed(lambda x: model(inputs_embeds=x, labels=inputs["labels"]).loss, embeds)
            )
    with loss_options(z_loss=1.0):
        model(**inputs)
        for loss in losses:
            model.zero_grad()
            run(loss.backward)
            gradients.append(model.lm_head.weight.grad)
    return gradients


def here(call):
    call()


def in_a_thread(call):
    """As backward passes on a GPU, which know nothing of the thread's blocks."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.sample(2)
@pytest.mark.parametrize("run", [here, in_a_thread])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_loss_has_the_options_of_its_forward(patched, use_reentrant, run, backend):
    _, model = pair(patched)
    inputs = batch()
    expected = gradients_of(model, inputs, lambda call, x: call(x), here)
    way = partial(torch.utils.checkpoint.checkpoint, use_reentrant=use_reentrant)
    for _ in range(2):
        close(gradients_of(model, inputs, way, run), expected, 1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_block_within_a_checkpoint(patched, use_reentrant, backend):
    _, model = pair(patched)
    inputs = batch()
    gradients = []

    def loss_of(embeds):
        with loss_options(temperature=0.5, evaluation=True, predictions=True) as report:
            loss = model(inputs_embeds=embeds, labels=inputs["labels"]).loss
        assert 0 <= report.accuracy <= 1
        return loss

    for way in (
        lambda call, x: call(x),
        partial(torch.utils.checkpoint.checkpoint, use_reentrant=use_reentrant),
    ):
        model.zero_grad()
        way(loss_of, model.get_input_embeddings()(inputs["input_ids"])).backward()
        gradients.append(model.lm_head.weight.grad)
    close(*gradients, 1e-5)


def test_a_report_is_of_the_last_forward(patched, backend):
    _, model = pair(patched)
    batches = [batch(), batch(rows=3)]
    with loss_options(log_probs=True) as report:
        losses = []
        for inputs in batches:
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            call = lambda x, labels=inputs["labels"]: model(inputs_embeds=x, labels=labels).loss  # noqa: E731
            losses.append(torch.utils.checkpoint.checkpoint(call, embeds, use_reentrant=False))
        losses[0].backward()
        assert report.log_probs.shape == (3, 12) and report.fused == 2


def test_options_are_let_go_with_their_graph(patched, backend):
    _, model = pair(patched)
    inputs = batch()
    weights = torch.rand(2, 12)
    alive = weakref.ref(weights)
    with loss_options(loss_weights=weights):
        loss = model(**inputs).loss
    loss.backward()
    del loss, weights
    model(**inputs)
    gc.collect()
    assert alive() is None
