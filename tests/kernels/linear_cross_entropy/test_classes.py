"""Fields of a sequence classifier's output: a row of logits and a label for each sequence."""

import pickle

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from tests.kernels.linear_cross_entropy.routed import load, twins
from tests.kernels.linear_cross_entropy.test_token_outputs import assert_same, of_logits
from tests.kernels.matching import close
from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy.options import TOKEN_OUTPUTS, loss_options
from veomni_hook.kernels.selection.process_choice import STATE, set_choice


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    return load(tmp_path_factory.mktemp("routed"), "transformers.models.gpt2.modeling_gpt2")


@pytest.fixture
def models(module):
    from transformers import GPT2Config

    set_choice("torch")
    sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "pad_token_id": 0}
    config = GPT2Config(**sizes, num_labels=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return twins(module, "GPT2ForSequenceClassification", config)


def batch():
    ids = torch.randint(1, 61, (4, 7))
    ids[1, 4:] = 0
    return {"input_ids": ids, "labels": torch.tensor([0, 2, -100, 1]), "use_cache": False}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("by", ["options", "config"])
def test_fields_and_gradients_are_those_of_upstreams_logits(models, temperature, by):
    upstream, model = models
    given = batch()
    reference = upstream(**given)
    model.config.token_outputs = by == "config"
    with loss_options(token_outputs=by == "options", temperature=temperature):
        output = model(**given)
    expected = of_logits(reference.logits, given["labels"], temperature)
    expected["loss"] = functional.cross_entropy(reference.logits / temperature, given["labels"])
    assert isinstance(output, SequenceClassifierOutputWithPast)
    assert list(output) == ["loss", "logits", *TOKEN_OUTPUTS]
    close(output.loss.detach(), expected["loss"].detach(), 1e-6)
    close(output.logits.detach(), reference.logits.detach(), 1e-6)
    assert output.log_probs.shape == (4,)
    model.config.token_outputs = False
    assert_same(upstream, model, expected, output)


def test_a_loss_with_options_and_a_report(models):
    upstream, model = models
    given, weights = batch(), torch.rand(4)
    target, logits = given["labels"], upstream(**given).logits
    losses = functional.cross_entropy(logits, target, label_smoothing=0.1, reduction="none")
    losses = losses + 0.2 * logits.logsumexp(-1).square()
    counts = weights.where(target != -100, 0)
    with loss_options(label_smoothing=0.1, z_loss=0.2, loss_weights=weights, predictions=True) as report:
        output = model(**given)
    close(output.loss, (losses * counts).sum() / counts.sum(), 1e-6)
    hits = (logits.argmax(-1) == target).sum() / 3
    close(report.accuracy, hits, 1e-6)
    assert list(output) == ["loss", "logits"]


def test_in_evaluation_and_through_pickle_and_tuples(models):
    upstream, model = (each.eval() for each in models)
    given = batch()
    with torch.no_grad(), loss_options(token_outputs=True):
        output = model(**given)
    assert_same(
        upstream, model, of_logits(upstream(**given).logits, given["labels"]), output, gradients=False
    )
    again = pickle.loads(pickle.dumps(output))
    assert type(again) is type(output) and torch.equal(again.entropy, output.entropy)
    assert torch.equal(output.to_tuple()[-1], output.token_accuracy)


def regression(model, given):
    model.config.num_labels, model.num_labels, model.score = 1, 1, torch.nn.Linear(32, 1)
    given["labels"] = torch.rand(4)


def several(model, given):
    given["labels"] = torch.rand(4, 3).round()


def own_loss(model, given):
    model.loss_function = lambda logits, labels, pooled_logits, config: pooled_logits.sum()


@pytest.mark.parametrize(
    ("change", "reason"),
    [(regression, "regression"), (several, "multi_label"), (own_loss, "own loss_function")],
)
def test_labels_that_are_not_classes(models, change, reason):
    _, model = models
    given = batch()
    change(model, given)
    assert list(model(**given))[:2] == ["loss", "logits"]
    with pytest.raises(KernelError, match=f"token_outputs are not available.*{reason}"):
        with loss_options(token_outputs=True):
            model(**given)
    model.config.token_outputs = True
    with pytest.raises(KernelError, match=f"there is no log_probs.*{reason}"):
        model(**given)
    model.config.token_outputs = False
    with loss_options(entropy=True) as report:
        model(**given)
    with pytest.raises(KernelError, match=reason):
        _ = report.entropy


def test_without_labels_or_a_request_the_output_is_upstreams(models):
    upstream, model = models
    given = batch()
    model.config.token_outputs = True
    assert type(model(given["input_ids"])) is type(upstream(given["input_ids"]))
    STATE.active = False
    STATE.changed()
    assert not hasattr(model(**given), "log_probs")


def test_the_generic_classifier(tmp_path_factory):
    """Its code is in `modeling_layers`, which imports the function while transformers is being imported."""
    module = load(tmp_path_factory.mktemp("layers"), "transformers.modeling_layers")
    import transformers.models.llama.modeling_llama as llama

    kind = type(
        "LlamaForSequenceClassification",
        (module.GenericForSequenceClassification, llama.LlamaPreTrainedModel),
        {},
    )
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=0, num_labels=3)
    model, given = kind(config).train(), batch()
    model.config.token_outputs = True
    output = model(**given)
    expected = of_logits(output.logits, given["labels"])
    for name in TOKEN_OUTPUTS:
        close(output[name], expected[name], 1e-6)
    close(output.loss, -output.log_probs.sum() / 3, 1e-6)
