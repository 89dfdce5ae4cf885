"""Calls that ask for log-probabilities by VeOmni's keywords, and losses with a teacher, against upstream's logits."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree

from tests.kernels.linear_cross_entropy.routed import batch, load, of_experts, own_loss, pair, twins
from tests.kernels.linear_cross_entropy.test_token_outputs import of_logits, predicted
from tests.kernels.matching import close, grads_of
from veomni_hook import Teacher, linear_cross_entropy, token_log_probs
from veomni_hook.errors import KernelError
from veomni_hook.kernels.linear_cross_entropy.objective import OF_TEACHER
from veomni_hook.kernels.linear_cross_entropy.options import TOKEN_OUTPUTS, loss_options
from veomni_hook.kernels.linear_cross_entropy.requested_call import FusedLinearAuxOutput
from veomni_hook.kernels.selection.process_choice import set_choice

K = 6


@pytest.fixture(autouse=True)
def named():
    set_choice("linear_cross_entropy=torch")


def keywords(shape=(2, 12), clamp=None):
    """A teacher of each label."""
    ids = torch.rand(*shape, 61).argsort(-1)[..., :K]
    log_probs = torch.randn(*shape, 61).log_softmax(-1).gather(-1, ids)
    return {"teacher_topk_ids": ids, "teacher_topk_log_probs": log_probs, "log_prob_min_clamp": clamp}


def shifted(teacher):
    """The teacher, aligned with positions."""
    return {
        name: functional.pad(each, (0, 0, 0, 1))[:, 1:] if isinstance(each, torch.Tensor) else each
        for name, each in teacher.items()
    }


def divergence(logits, target, teacher, temperature=1.0):
    """The three numbers of a teacher that is aligned with positions."""
    ids, log_p, clamp = teacher.values()
    counts, log_q = target != -100, (logits / temperature).log_softmax(-1).gather(-1, ids)
    masses = [each.exp().sum(-1).where(counts, 0) for each in (log_q, log_p)]
    if clamp is not None:
        log_p, log_q = log_p.clamp(min=clamp), log_q.clamp(min=clamp)
    losses = (log_p.exp() * (log_p - log_q)).sum(-1).where(counts, 0)
    return dict(zip(OF_TEACHER, (losses, *masses), strict=True))


def objective_of(numbers):
    weights = torch.linspace(-1, 1, numbers["log_probs"].numel()).reshape(numbers["log_probs"].shape)
    total = numbers["log_probs"].exp() * weights + numbers["entropy"] * weights.square()
    return (total + numbers.get("distillation_losses", 0) * weights.flip(0)).sum()


def assert_same(models, expected, aux):
    """Compare the fields, and the gradients of a loss of them."""
    assert type(aux) is FusedLinearAuxOutput and list(aux) == [
        name for name in expected if name != "token_accuracy"
    ]
    for name, value in aux.items():
        assert value.dtype is torch.float32 and value.requires_grad is not name.endswith("mass")
        close(value.detach(), expected[name].detach(), 1e-5)
    for numbers in (expected, aux):
        objective_of(numbers).backward()
    close(*map(grads_of, models[::-1]), 1e-5)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("teacher", [None, {}, {"clamp": -3.0}], ids=["alone", "teacher", "clamped"])
def test_fields_and_gradients(patched, backend, temperature, teacher):
    set_choice(f"linear_cross_entropy={backend}")
    upstream, model = pair(patched)
    inputs, teacher = batch(), None if teacher is None else keywords(**teacher)
    logits, target = upstream(inputs["input_ids"]).logits, predicted(inputs["labels"])
    expected = of_logits(logits, target, temperature)
    if teacher is not None:
        expected |= divergence(logits, target, shifted(teacher), temperature)
    output = model(**inputs, return_log_probs=True, temperature=temperature, **(teacher or {}))
    assert output.loss is None and output.logits is None
    assert output.log_probs is output.fused_linear_aux.log_probs
    assert output.entropy is output.fused_linear_aux.entropy
    assert_same((upstream, model), expected, output.fused_linear_aux)


@pytest.mark.parametrize("kept", [slice(None), slice(1, None)], ids=["contiguous", "a view"])
def test_labels_that_are_shifted_already(patched, kept):
    upstream, model = pair(patched)
    inputs = batch(length=13)
    inputs = {name: each[:, kept] for name, each in inputs.items()}
    teacher = keywords(inputs["labels"].shape)
    wider = functional.pad(inputs["labels"], (0, 1), value=7)
    target = wider[:, 1:]
    assert not target.is_contiguous()
    logits = upstream(inputs["input_ids"]).logits
    expected = of_logits(logits, target) | divergence(logits, target, teacher)
    output = model(**inputs, shift_labels=target, return_log_probs=True, **teacher)
    assert output.fused_linear_aux.log_probs[:, -1].all()
    assert_same((upstream, model), expected, output.fused_linear_aux)


def test_another_index_is_ignored(patched):
    upstream, model = pair(patched)
    inputs = batch()
    labels = inputs["labels"].where(inputs["labels"] != -100, 5)
    target = functional.pad(labels, (0, 1), value=5)[:, 1:]
    expected = of_logits(upstream(inputs["input_ids"]).logits, target, ignored=5)
    output = model(inputs["input_ids"], labels=labels, ignore_index=5, return_log_probs=True)
    assert_same((upstream, model), expected, output.fused_linear_aux)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_in_evaluation(patched, context):
    upstream, model = (each.eval() for each in pair(patched))
    inputs = batch()
    with context():
        expected = of_logits(upstream(inputs["input_ids"]).logits, predicted(inputs["labels"]))
        found = model(**inputs, return_log_probs=True).fused_linear_aux
    for name, value in found.items():
        close(value, expected[name], 1e-5)
        assert not value.requires_grad


def test_a_call_and_the_options_around_it(patched):
    _, model = pair(patched)
    inputs, teacher = batch(), keywords()
    options = {"label_smoothing": 0.1, "loss_weights": torch.rand(2, 12)}
    with loss_options(token_outputs=("token_accuracy", "entropy"), temperature=0.5, **options):
        both = model(**inputs, return_log_probs=True, use_cache=False)
        own = model(**inputs, return_log_probs=True, temperature=2.0)
    assert list(both) == ["entropy", "token_accuracy", "fused_linear_aux"]
    alone = [model(**inputs, return_log_probs=True, temperature=each) for each in (0.5, 2.0)]
    for found, expected in zip((both, own), alone, strict=True):
        close(found.log_probs, expected.log_probs, 1e-6)
        close(found.entropy, found.fused_linear_aux.entropy, 1e-6)
    with loss_options(teacher=Teacher(*teacher.values()), token_outputs=True):
        by_options = model(**inputs)
    by_call = model(**inputs, return_log_probs=True, **teacher)
    assert list(by_options)[-6:] == [*TOKEN_OUTPUTS, *OF_TEACHER]
    for name, value in by_call.fused_linear_aux.items():
        assert torch.equal(value, by_options[name])
    assert not by_options.student_mass.requires_grad
    # Without the request, these keywords have no effect.
    close(model(**inputs, temperature=0.5, **teacher).loss, model(**inputs).loss, 1e-6)


class TestOutputs:
    @pytest.fixture
    def output(self, patched):
        _, model = pair(patched)
        return model(**batch(), return_log_probs=True, use_cache=False, **keywords())

    def test_have_one_field(self, output):
        assert list(output) == ["fused_linear_aux"] and output.to_tuple() == (output[0],)
        with pytest.raises(AttributeError):
            output.log_probs = output.entropy

    def test_without_a_dictionary(self, patched):
        _, model = pair(patched)
        (found,) = model(**batch(), return_log_probs=True, use_cache=False, return_dict=False)
        assert type(found) is FusedLinearAuxOutput

    def test_wrappers_find_the_tensors(self, output):
        leaves = _pytree.tree_leaves(output)
        assert {id(each) for each in output.fused_linear_aux.values()} == {id(each) for each in leaves}
        doubled = _pytree.tree_map(lambda x: x * 2, output)
        assert torch.equal(doubled.log_probs, 2 * output.log_probs)

    @pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_are_copied_and_pickled(self, patched, through):
        _, model = pair(patched)
        with torch.no_grad():
            output = model(**batch(), return_log_probs=True, use_cache=False)
        assert torch.equal(through(output).fused_linear_aux.entropy, output.entropy)


def test_a_loss_of_experts_is_not_there_either(tmp_path_factory):
    models = of_experts(tmp_path_factory.mktemp("moe"))
    inputs = batch()
    expected = of_logits(models[0](inputs["input_ids"]).logits, predicted(inputs["labels"]))
    output = models[1](**inputs, return_log_probs=True, output_router_logits=True)
    assert output.loss is None and output.aux_loss > 0
    assert_same(models, expected, output.fused_linear_aux)


@pytest.mark.parametrize("half", ["teacher_topk_ids", "teacher_topk_log_probs"])
def test_half_of_a_teacher(patched, half):
    _, model = pair(patched)
    teacher = keywords()
    del teacher[half]
    with pytest.raises(KernelError, match=f"there is no {half}"):
        model(**batch(), return_log_probs=True, **teacher)


def wrong_teachers():
    ids, log_probs, _ = keywords().values()
    yield "not int64", Teacher(ids.int(), log_probs)
    yield "not int64", Teacher(ids, log_probs[..., 1:])
    yield "the labels", Teacher(ids[:, 1:], log_probs[:, 1:])
    yield "not both tensors", Teacher(ids, log_probs.tolist())
    yield "log_prob_min_clamp is a str", Teacher(ids, log_probs, "-10")


@pytest.mark.parametrize(("told", "teacher"), [*wrong_teachers()])
def test_a_teacher_of_another_form(patched, told, teacher):
    _, model = pair(patched)
    ids, log_probs, clamp = teacher
    asked = {"teacher_topk_ids": ids, "teacher_topk_log_probs": log_probs, "log_prob_min_clamp": clamp}
    with pytest.raises(KernelError, match=told):
        model(**batch(), return_log_probs=True, **asked)
    with pytest.raises(KernelError, match=told), loss_options(teacher=teacher, token_outputs=True):
        model(**batch())
    with pytest.raises(KernelError, match=told):
        token_log_probs(torch.ones(2, 12, 4), torch.ones(61, 4), batch()["labels"], teacher=teacher)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"distillation": 0.5}, "no teacher"),
        (
            {"distillation": 0.5, "label_smoothing": 0.1, "teacher": Teacher(*keywords().values())},
            "also label_smoothing",
        ),
        ({"distillation": 1.5}, "not between 0 and 1"),
        ({"token_outputs": ("student_mass",)}, "token_outputs is"),
    ],
)
def test_options_that_are_not_valid(options, told):
    with pytest.raises(KernelError, match=told), loss_options(**options):
        pass


def test_what_only_upstream_can_compute_is_an_error(patched):
    _, model = pair(patched)
    inputs = {**batch(), "use_cache": False}
    set_choice("linear_cross_entropy=eager")
    with pytest.raises(KernelError, match=r"there is no log_probs, entropy: .*eager is chosen"):
        model(**inputs, return_log_probs=True)
    set_choice("linear_cross_entropy=liger")
    with pytest.raises(KernelError, match="liger"):
        model(**inputs, return_log_probs=True)
    set_choice("auto")
    assert list(model(**inputs, return_log_probs=True)) == ["fused_linear_aux"]
    with pytest.raises(KernelError, match=r"there is no log_probs.*an exported program"):
        torch.export.export(model, (), {**inputs, "return_log_probs": True}, strict=False)
    model.loss_function = own_loss
    with pytest.raises(KernelError, match=r"there is no log_probs.*own_loss"):
        model(**inputs, return_log_probs=True)
    with pytest.raises(KernelError, match=r"distillation is not available.*own_loss"):
        with loss_options(teacher=Teacher(*keywords().values()), distillation=0.5):
            model(**inputs)


@pytest.mark.parametrize("fields", [False, True], ids=["the loss", "with fields"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_loss_with_a_teacher(patched, share, fields):
    upstream, model = pair(patched)
    inputs, teacher, weights = batch(), keywords(), torch.rand(2, 12)
    logits, target = upstream(inputs["input_ids"]).logits, predicted(inputs["labels"])
    own = functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    losses = (1 - share) * own + share * divergence(logits, target, shifted(teacher))["distillation_losses"]
    expected = (losses * functional.pad(weights, (0, 1))[:, 1:]).sum() / 7
    options = {"distillation": share, "loss_weights": weights, "token_outputs": fields}
    with loss_options(teacher=Teacher(*teacher.values()), **options):
        output = model(**inputs, num_items_in_batch=7)
    close(output.loss.detach(), expected.detach(), 1e-5)
    expected.backward()
    output.loss.backward()
    close(grads_of(model), grads_of(upstream), 1e-5)


def test_functions():
    x, weight = torch.randn(2, 12, 8), torch.randn(61, 8)
    target, teacher = batch()["labels"], keywords(clamp=-4.0)
    expected = divergence(x @ weight.T, target, teacher, 0.7)
    found = token_log_probs(x, weight, target, 0.7, teacher=Teacher(*teacher.values()))
    for name, value in expected.items():
        close(getattr(found, name), value, 1e-5)
    loss = linear_cross_entropy(x, weight, target, teacher=Teacher(*teacher.values()), distillation=1.0)
    close(
        loss,
        divergence(x @ weight.T, target, teacher)["distillation_losses"].sum() / (target != -100).sum(),
        1e-5,
    )


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["torch", "auto"])
def test_compiled(patched, choice):
    set_choice(choice)
    models = pair(patched)
    inputs, teacher = batch(), keywords()
    logits, target = models[0](inputs["input_ids"]).logits, predicted(inputs["labels"])
    expected = of_logits(logits, target, 0.7) | divergence(logits, target, shifted(teacher), 0.7)
    torch.compiler.reset()
    run = torch.compile(models[1], fullgraph=True, backend="aot_eager")
    output = run(**inputs, return_log_probs=True, temperature=0.7, use_cache=False, **teacher)
    assert output.loss is None and list(output) == ["fused_linear_aux"]
    assert_same(models, expected, output.fused_linear_aux)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_omni"])
def test_a_model_that_does_not_pass_its_keywords_to_the_loss(family, tmp_path_factory):
    """Some releases of the first do not, the second does in none."""
    from tests.multimodal.families import FAMILIES

    module = load(tmp_path_factory.mktemp(family), f"transformers.models.{family}.modeling_{family}")
    name, sizes = FAMILIES[family]
    kind = f"{name}ForConditionalGeneration"
    upstream, model = twins(module, kind, getattr(module, f"{name}Config")(**sizes))
    inputs = {**batch(), "use_cache": False}
    teacher = keywords()
    logits, target = upstream(**inputs).logits, predicted(inputs["labels"]).roll(1, 1)
    expected = of_logits(logits, target, 0.7) | divergence(logits, target, teacher, 0.7)
    output = model(**inputs, return_log_probs=True, temperature=0.7, shift_labels=target, **teacher)
    for field, value in output.fused_linear_aux.items():
        close(value.detach(), expected[field].detach(), 1e-5)
    # Else they have no effect, as upstream.
    close(model(**inputs, num_items_in_batch=7).loss, upstream(**inputs, num_items_in_batch=7).loss, 1e-5)
