import logging
from types import SimpleNamespace

import pytest
import torch
import transformers.loss.loss_utils as loss_utils
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.kernels.linear_cross_entropy.routed import batch, pair, with_decoder
from tests.kernels.matching import close, grads_of
from tests.kernels.slot.test_repeated import tells_hooks
from veomni_hook.kernels.linear_cross_entropy import causal_lm
from veomni_hook.kernels.linear_cross_entropy.output import LazyLogits
from veomni_hook.kernels.selection.binding import use_kernels
from veomni_hook.kernels.selection.process_choice import set_choice
from veomni_hook.kernels.selection.registry import registry


@pytest.fixture(autouse=True)
def torch_by_name():
    set_choice("linear_cross_entropy=torch")


def outcome(patched, model):
    return patched.veomni_linear_cross_entropy_next_token.outcome(model)


def step(model, inputs):
    """Return the output of one training step, and the gradient of every parameter."""
    model.zero_grad()
    output = model(**inputs)
    output["loss"].sum().backward()
    return output, grads_of(model)


def assert_equal_steps(upstream, patched, inputs, tolerance=1e-5):
    expected, expected_grads = step(upstream, inputs)
    got, grads = step(patched, inputs)
    assert got["loss"].shape == expected["loss"].shape
    close(got["loss"].detach(), expected["loss"].detach(), tolerance)
    close(grads, expected_grads, tolerance)
    return got


KWARGS = [
    {},
    {"num_items_in_batch": 9},
    {"num_items_in_batch": torch.tensor(9)},
    {"num_items_in_batch": torch.tensor([9.5])},
    {"ignore_index": 3},
    {"logits_to_keep": 0},
    {"shift_labels": "given"},
    {"shift_labels": "given", "logits_to_keep": torch.arange(4, 10)},
    {"use_cache": False, "output_hidden_states": True},
    {"label_smoothing": 0.3, "reduction": "none"},
]


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_honours_what_the_upstream_loss_honours(patched, config, kwargs):
    inputs = {**batch(), **kwargs}
    if "ignore_index" in kwargs:
        inputs["labels"] = inputs["input_ids"]
    if "shift_labels" in kwargs:
        kept = len(kwargs.get("logits_to_keep", range(12)))
        inputs["shift_labels"] = torch.randint(0, 61, (2, kept))
        inputs["shift_labels"][0] = -100
    got = assert_equal_steps(*pair(patched, **config), inputs)
    assert isinstance(got, LazyLogits)
    assert set(got) >= {"loss", "logits"}


def cast(dtype):
    return lambda model: model.to(dtype)


def biased(model):
    torch.manual_seed(1)
    model.lm_head.bias = nn.Parameter(torch.randn(61))


def frozen(part):
    def change(model):
        model.get_submodule(part).requires_grad_(False)
        model.model.norm.requires_grad_(True)

    return change


MODELS = {
    "bfloat16": (cast(torch.bfloat16), 3e-2),
    "float64": (cast(torch.float64), 1e-5),
    "a bias": (biased, 1e-5),
    "a frozen head": (frozen("lm_head"), 1e-5),
    "a frozen body": (frozen("model"), 1e-5),
    "all but a norm frozen": (frozen(""), 1e-5),
    "checkpointing": (lambda model: model.gradient_checkpointing_enable(), 1e-5),
}


@pytest.mark.parametrize(("change", "tolerance"), MODELS.values(), ids=MODELS)
def test_other_models(patched, change, tolerance):
    models = pair(patched)
    for model in models:
        change(model)
    assert isinstance(assert_equal_steps(*models, batch(), tolerance), LazyLogits)


def test_under_autocast(patched):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = assert_equal_steps(*pair(patched), batch(), tolerance=3e-2)
        assert isinstance(got, LazyLogits)
        assert got.logits.dtype is torch.bfloat16


def test_gradient_accumulation(patched):
    models = pair(patched)
    parts = [{**batch(), "num_items_in_batch": torch.tensor(30)} for _ in range(3)]
    for model in models:
        for part in parts:
            model(**part)["loss"].backward()
    close(grads_of(models[1]), grads_of(models[0]), 1e-5)


def test_checkpointing_around_the_model(patched):
    upstream, model = pair(patched)
    inputs = batch()
    _, expected = step(upstream, inputs)

    def loss_of(embeds):
        return model(inputs_embeds=embeds, labels=inputs["labels"])["loss"]

    for use_reentrant in (True, False):
        model.zero_grad()
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        loss = torch.utils.checkpoint.checkpoint(loss_of, embeds, use_reentrant=use_reentrant)
        loss.backward()
        close(model.lm_head.weight.grad, expected["lm_head.weight"], 1e-5)


def read_within(output):
    return output.loss + 0.1 * output.logits.float().logsumexp(-1).mean()


@tells_hooks
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_logits_read_within_a_checkpoint_around_the_model(patched, use_reentrant):
    twins = pair(patched)
    inputs = batch()
    gradients = []
    for model in twins:
        for _ in range(2):  # from the second step on, upstream's code computes the loss
            model.zero_grad()
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            torch.utils.checkpoint.checkpoint(
                lambda x, model=model: read_within(model(inputs_embeds=x, labels=inputs["labels"])),
                embeds,
                use_reentrant=use_reentrant,
            ).backward()
            gradients.append(grads_of(model))
    for got in gradients[1:]:
        close(got, gradients[0], 1e-5)


@tells_hooks
def test_logits_read_between_a_forward_and_its_recomputation(patched):
    upstream, model = pair(patched)
    inputs = batch()
    _, expected = step(upstream, inputs)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    loss = torch.utils.checkpoint.checkpoint(
        lambda x: model(inputs_embeds=x, labels=inputs["labels"]).loss, embeds, use_reentrant=False
    )
    assert model(**inputs)["logits"].sum()
    assert not isinstance(model(**inputs), LazyLogits)
    loss.backward()
    close(model.lm_head.weight.grad, expected["lm_head.weight"], 1e-5)


def test_upstream_code_in_eval_mode_and_without_gradients(patched):
    upstream, model = pair(patched)
    inputs = batch()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, upstream(**inputs).logits)
        assert "disabled" in outcome(patched, model).reason
    model.eval()
    assert type(model(**inputs)).__name__ == "CausalLMOutputWithPast"
    assert not isinstance(model(**inputs), LazyLogits)
    assert "eval" in outcome(patched, model).reason


def test_without_labels_nothing_is_asked(patched):
    _, model = pair(patched)
    assert not isinstance(model(batch()["input_ids"]), LazyLogits)
    assert outcome(patched, model) is None


def own_loss(logits, labels, vocab_size, **kwargs):
    return loss_utils.ForCausalLMLoss(logits, labels, vocab_size, **kwargs) * 2


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        torch.manual_seed(1)
        self.base, self.add = base, nn.Linear(32, 61, bias=False)

    def forward(self, x):
        return self.base(x) + self.add(x)


UPSTREAMS = {
    "own_loss": lambda model, _: setattr(model, "loss_function", own_loss),
    "Lora": lambda model, _: setattr(model, "lm_head", Lora(model.lm_head)),
    "fixed_cross_entropy was replaced": lambda _, patch: patch.setattr(
        loss_utils, "fixed_cross_entropy", lambda *a, **k: PLAIN(*a, **k) + 1
    ),
}
PLAIN = loss_utils.fixed_cross_entropy


@pytest.mark.parametrize("reason", UPSTREAMS)
def test_what_is_left_to_upstream(patched, reason, monkeypatch):
    models = pair(patched)
    for model in models:
        UPSTREAMS[reason](model, monkeypatch)
    assert not isinstance(assert_equal_steps(*models, batch()), LazyLogits)
    assert reason in outcome(patched, models[1]).reason


def test_a_hook_on_the_head_sees_logits(patched):
    _, model = pair(patched)
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    model(**batch())
    assert seen == [(2, 12, 61)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_items_in_batch": torch.tensor([4, 5])}, "num_items_in_batch"),
        ({"num_items_in_batch": 4 + 0j}, "num_items_in_batch"),
        ({"shift_labels": torch.zeros(12, 2, dtype=torch.int64).t()}, "contiguous"),
        ({"labels": torch.zeros(2, 12, dtype=torch.int32)}, "int64"),
        ({"labels": torch.zeros(2, 11, dtype=torch.int64)}, "int64"),
        ({"ignore_index": -100.0}, "ignore_index"),
        ({"logits_to_keep": 3}, "labels"),
        ({"labels": [[1] * 12] * 2}, "list"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_arguments_that_only_upstream_understands(patched, change, reason):
    upstream, model = pair(patched)
    inputs = {**batch(), **change}
    failures = []
    for each in (upstream, model):
        try:
            each(**inputs)
            failures.append(None)
        except Exception as error:
            failures.append(str(error))
    assert failures[0] == failures[1]
    assert reason in outcome(patched, model).reason


def test_a_vocabulary_that_is_not_the_heads(patched):
    _, model = pair(patched)
    model.config.vocab_size = 60
    with pytest.raises(RuntimeError):
        model(**batch())
    assert "vocab_size" in outcome(patched, model).reason


def test_weights_that_turn_out_unsuited_cost_one_fallback(patched):
    upstream, model = pair(patched)
    weight = model.lm_head.weight.detach().as_subclass(Strange)
    del model.lm_head.weight
    model.lm_head.weight = weight
    inputs = batch()
    expected = upstream(**inputs)
    got = model(**inputs)
    assert torch.equal(got.loss.as_subclass(torch.Tensor), expected.loss)
    assert torch.equal(got.logits.as_subclass(torch.Tensor), expected.logits)
    model(**inputs)
    assert "Strange" in outcome(patched, model).reason


class Strange(torch.Tensor):
    pass


def test_a_backend_by_name_that_cannot_serve_is_a_warning_once(patched, caplog):
    _, model = pair(patched)
    model.eval()
    with caplog.at_level(logging.INFO, "veomni_hook.kernels"):
        slot = patched.veomni_linear_cross_entropy_next_token
        slot.site.said.clear()
        registry.version += 1  # what it answered before is forgotten
        model(**batch())
        model(**batch())
    told = [record for record in caplog.records if "eval mode" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"]


def test_the_reference_answers_in_eval_mode_and_without_gradients(patched):
    set_choice("linear_cross_entropy=reference")
    upstream, model = (each.eval() for each in pair(patched))
    inputs = batch()
    for _ in range(2):
        with torch.no_grad():
            expected, got = upstream(**inputs), model(**inputs)
        assert isinstance(got, LazyLogits)
        assert torch.equal(got.loss, expected.loss)
        assert torch.equal(got.logits, expected.logits)
        assert not got.logits.requires_grad
    assert outcome(patched, model).backend == "reference"


def test_a_head_around_its_linear(patched):
    models = with_decoder(pair(patched))
    inputs = batch()
    got = assert_equal_steps(*models, inputs)
    assert isinstance(got, LazyLogits)
    assert torch.equal(got.logits, models[0](**inputs).logits)


def test_a_head_that_changes_logits_falls_back_once(patched):
    models = with_decoder(pair(patched), after=lambda logits: logits * 2)
    got = assert_equal_steps(*models, batch())
    assert not isinstance(got, LazyLogits)
    assert outcome(patched, models[1]).backend == "torch", "that was found out in the head"
    assert_equal_steps(*models, batch())
    assert "the head returns" in outcome(patched, models[1]).reason


def test_a_masked_language_model_counts_its_own_tokens(patched):
    models = pair(patched)
    for model in models:
        model.loss_function = loss_utils.ForMaskedLMLoss
    for kwargs in ({}, {"num_items_in_batch": 5}, {"shift_labels": torch.zeros(2, 12, dtype=torch.int64)}):
        assert isinstance(assert_equal_steps(*models, {**batch(), **kwargs}), LazyLogits)


@pytest.fixture
def call(patched):
    """A model, and the operands of its loss."""
    model = pair(patched)[1]
    return model, torch.randn(2, 12, 32), model.lm_head, torch.randint(0, 61, (2, 12)), 61


def test_labels_have_to_be_there_even_if_shifted_ones_are_given(call):
    model, hidden, head, labels, vocab = call
    for loss, given, reason in (("ForMaskedLMLoss", None, "NoneType"), ("ForCausalLMLoss", None, None)):
        model.loss_function = getattr(loss_utils, loss)
        found = causal_lm.refuses(model, hidden, head, given, vocab, {"shift_labels": labels})
        assert found is None if reason is None else reason in found


def test_a_scale_that_is_learned(call):
    assert causal_lm.refuses(*call, {}, {"scale": 2.0}) is None
    assert "Parameter" in causal_lm.refuses(*call, {}, {"scale": nn.Parameter(torch.ones(()))})


def test_what_comes_before_the_head_runs_once(call):
    _, hidden, head, labels, _ = call
    calls = []

    def before_head(x):
        calls.append(x.shape)
        return 2 * x

    request = causal_lm.Call(*call, {}, {"before_head": before_head})
    loss, logits, finish = causal_lm.reference_output(*request)
    assert calls == [(2, 12, 32)]
    expected = head(2 * hidden)
    assert torch.equal(finish(CausalLMOutputWithPast(loss=loss, logits=logits)).logits, expected)
    close(loss, loss_utils.ForCausalLMLoss(expected, labels, 61), 1e-6)


def test_a_head_that_only_hands_on_what_comes_before_it(call):
    model, hidden, head, labels, vocab = call
    identity = nn.Identity()
    call = (model, hidden, identity, labels, vocab, {}, {"before_head": head, "scale": 2.0})
    assert causal_lm.refuses(*call) is None
    loss, logits, finish = causal_lm.reference_output(*call)
    expected = 2.0 * head(hidden)
    close(loss, loss_utils.ForCausalLMLoss(expected, labels, 61), 1e-6)
    assert torch.equal(finish(CausalLMOutputWithPast(loss=loss, logits=logits)).logits, expected)
    identity.register_forward_hook(lambda *_: None)
    with use_kernels(linear_cross_entropy="reference"):  # it may compute where logits were read
        assert "Identity" in causal_lm.refuses(*call)


def test_an_output_that_cannot_wait_gets_its_logits(call):
    loss, logits, finish = causal_lm.reference_output(*call, {})
    output = finish(SimpleNamespace(loss=loss, logits=logits))
    assert torch.equal(output.logits, call[2](call[1]))


def test_what_is_known_of_logits_that_nobody_has_read(call):
    model, hidden, *rest = call
    for options, dtype in (({}, torch.bfloat16), ({"dtype": torch.float32}, torch.float32)):
        logits = causal_lm.reference_output(model.bfloat16(), hidden.bfloat16(), *rest, {}, options).logits
        assert logits.device == hidden.device
        assert logits.dtype is dtype is logits.compute().dtype


def test_a_head_that_turns_the_request_down_gives_upstreams_logits(call):
    model, hidden, _, labels, vocab = call
    head = with_decoder((model, model), after=lambda logits: logits + 1)[0].lm_head
    options = {"num_items_in_batch": 7}, {"scale": 2.0, "softcap": 3.0}
    loss, logits, finish = causal_lm.reference_output(model, hidden, head, labels, vocab, *options)
    expected = torch.tanh(head(hidden) * 2 / 3) * 3
    assert torch.equal(logits, expected)
    assert torch.equal(loss, loss_utils.ForCausalLMLoss(expected, labels, 61, num_items_in_batch=7))
    made = CausalLMOutputWithPast(loss=loss, logits=logits)
    assert finish(made) is made
