"""Calls of a plain model with VeOmni's keywords, against VeOmni's own functions of its hidden states."""

import pytest
import torch

pytest.importorskip("veomni")

from transformers.loss.loss_utils import LOSS_MAPPING
from veomni.distributed import parallel_state
from veomni.ops.kernels import cross_entropy
from veomni.ops.kernels.cross_entropy import chunk_logprobs_function, chunk_topk_distill_function

from tests.kernels.linear_cross_entropy.routed import batch, load, pair
from tests.kernels.matching import close
from veomni_hook.errors import KernelError
from veomni_hook.kernels.selection.process_choice import set_choice

FIELDS = ("log_probs", "entropy", "distillation_losses", "student_mass", "teacher_mass")


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    return load(tmp_path_factory.mktemp("routed"))


def teacher_of(shape):
    ids = torch.rand(*shape, 61).argsort(-1)[..., :8]
    ids[0, 5, 3] = ids[0, 5, 1]  # VeOmni adds up a token that is there twice
    log_probs = torch.randn(*shape, 61).log_softmax(-1).gather(-1, ids)
    return {"teacher_topk_ids": ids, "teacher_topk_log_probs": log_probs}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [False, True], ids=["labels", "shifted"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"taught": True},
        {"taught": True, "temperature": 0.7, "log_prob_min_clamp": -4.0},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_names_shapes_signs_and_gradients(patched, options, shift, dtype):
    set_choice("linear_cross_entropy=torch")
    torch.manual_seed(3)
    theirs, ours = (model.to(dtype) for model in pair(patched))
    inputs, options = batch(), dict(options)
    if shift:
        inputs["shift_labels"] = inputs["labels"].roll(-1, -1)
    taught = teacher_of((2, 12)) if options.pop("taught", False) else {}
    function = chunk_topk_distill_function if taught else chunk_logprobs_function
    hidden = theirs.model(inputs["input_ids"]).last_hidden_state
    found = function(
        hidden, theirs.lm_head.weight, inputs["labels"], *taught.values(), shift_labels=inputs.get("shift_labels"),
        **options,
    )  # fmt: skip
    expected = dict(zip(FIELDS, found, strict=False))
    output = ours(**inputs, return_log_probs=True, **options, **taught)
    assert output.loss is None and output.logits is None and list(output.fused_linear_aux) == list(expected)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for numbers in (expected, output.fused_linear_aux):
        weights = torch.linspace(-1, 1, 24).reshape(2, 12)
        sum(
            (numbers[name] * weights.roll(place)).sum() for place, name in enumerate(FIELDS[: len(numbers)])
        ).backward()
    for name, value in expected.items():
        own = output.fused_linear_aux[name]
        # VeOmni's masses say that they require a gradient where it pads nothing, and give none.
        assert (own.shape, own.dtype, own.requires_grad) == (value.shape, value.dtype, "mass" not in name)
        close(own.detach(), value.detach(), tolerance)
    for wanted, got in zip(theirs.parameters(), ours.parameters(), strict=True):
        close(got.grad, wanted.grad, 4 * tolerance)


@pytest.fixture
def installed(monkeypatch):
    """VeOmni's loss in transformers' table, as its trainers install it."""
    for key in ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification"):
        monkeypatch.setitem(LOSS_MAPPING, key, LOSS_MAPPING[key])
    return cross_entropy.install_loss_mapping


@pytest.mark.parametrize("name", ["eager", "chunk_loss"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("choice", ["auto", "linear_cross_entropy=torch"])
def test_with_veomnis_own_loss_in_force(patched, installed, choice, mode, name):
    set_choice(choice)
    upstream, model = (getattr(each, mode)() for each in pair(patched))
    inputs = batch()
    expected = upstream(**inputs, num_items_in_batch=7).loss
    installed(name)
    output = model(**inputs, num_items_in_batch=7)
    close(output.loss.detach(), expected.detach(), 1e-5)
    aux = model(**inputs, return_log_probs=True).fused_linear_aux
    close(-aux.log_probs.detach().sum() / 7, expected.detach(), 1e-5)


def test_veomnis_own_loss_of_split_sequences_is_left_to_veomni(patched, installed, monkeypatch):
    installed("eager")
    monkeypatch.setattr(parallel_state, "_PARALLEL_STATE", parallel_state.ParallelState())
    monkeypatch.setattr(parallel_state.ParallelState, "sp_enabled", True)
    with pytest.raises(KernelError, match="VeOmni splits the sequences"):
        pair(patched)[1](**batch(), return_log_probs=True)
