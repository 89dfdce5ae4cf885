"""Fields of outputs that a choice of kernels, a compiler or an export may leave out: then it is an error."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.kernels.linear_cross_entropy.routed import batch, pair
from veomni_hook.errors import KernelError
from veomni_hook.kernels.bind import bind
from veomni_hook.kernels.linear_cross_entropy.options import loss_options
from veomni_hook.kernels.linear_cross_entropy.output import HELD
from veomni_hook.kernels.selection.declaration import Requirement
from veomni_hook.kernels.selection.process_choice import set_active, set_choice
from veomni_hook.kernels.selection.registry import registry


@pytest.mark.parametrize("where", ["config", "block"])
@pytest.mark.parametrize("chosen", ["by the process", "for the model"])
def test_eager_cannot_have_the_fields(patched, where, chosen):
    _, model = pair(patched)
    if chosen == "for the model":
        bind(model, "eager")
    else:
        set_choice("linear_cross_entropy=eager")
    model.config.token_outputs = where == "config"
    with pytest.raises(KernelError, match=r"(there is no log_probs|not available).*eager is chosen"):
        with nullcontext() if where == "config" else loss_options(token_outputs=True):
            model(**batch())
    assert list(model(batch()["input_ids"], use_cache=False)) == ["logits"]
    model.config.token_outputs = False
    assert list(model(**batch(), use_cache=False)) == ["loss", "logits"]


def test_a_hook_that_is_off_leaves_all_to_upstream(patched):
    _, model = pair(patched)
    model.config.token_outputs = True
    set_active(False)
    assert list(model(**batch(), use_cache=False)) == ["loss", "logits"]


def test_auto_leaves_compiled_code_without_fields_to_inductor(patched):
    set_choice("auto")
    _, model = pair(patched, num_hidden_layers=0)
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True, backend="eager")
    inputs = {**batch(), "use_cache": False}
    for fields in ((), ("entropy",), ()):
        model.config.token_outputs = fields
        output = run(**inputs)
        assert list(output) == ["loss", "logits", *fields]
        assert (HELD in output.__dict__) is bool(fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eager", "liger"])
def test_choices_that_cannot_be_compiled(patched, name):
    _, model = pair(patched, num_hidden_layers=0)
    model.config.token_outputs = True
    torch.compiler.reset()
    with registry.restored():
        for kernel in registry.kernels():
            if kernel.backend == "liger":  # not traceable
                registry.replace(replace(kernel, requires=Requirement()))
        set_choice(f"linear_cross_entropy={name}")
        with pytest.raises(KernelError, match=f"because .*{name} "):
            torch.compile(model, backend="eager")(**batch())
        torch.compiler.reset()
        # Dynamo wraps what it finds while it traces one graph.
        with pytest.raises(Exception, match=r"there is no|KernelError"):
            torch.compile(model, fullgraph=True, backend="eager")(**batch())


@pytest.mark.parametrize("ignored", ["by the config", "by the call", "nothing"])
def test_what_trainer_gathers(patched, tmp_path, ignored):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    _, model = pair(patched)
    model.config.token_outputs = ("token_accuracy",)
    keys, given = ["logits", "past_key_values"], []
    if ignored == "by the config":
        model.config.keys_to_ignore_at_inference = keys
    inputs = batch()
    rows = [{name: each[row] for name, each in inputs.items()} for row in range(2)]
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True),
        eval_dataset=rows,
        compute_metrics=lambda found: given.append(found.predictions) or {},
    )
    trainer.evaluate(**({"ignore_keys": keys} if ignored == "by the call" else {}))
    (predictions,) = given
    if ignored == "nothing":
        assert [each.shape for each in predictions] == [(2, 12, 61), (2, 12)]
    else:
        assert predictions.shape == (2, 12)
        assert (torch.from_numpy(predictions) == model(**inputs).token_accuracy).all()


def test_exported(patched):
    _, model = pair(patched, num_hidden_layers=0)
    inputs = {**batch(), "use_cache": False}
    torch.export.export(model, (), inputs, strict=False)
    model.config.token_outputs = True
    with pytest.raises(KernelError, match="an exported program runs without"):
        torch.export.export(model, (), inputs, strict=False)
