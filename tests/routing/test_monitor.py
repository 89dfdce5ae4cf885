"""The load of experts: counted from what routers choose, without a change of what they compute."""

from xml.etree import ElementTree

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.kernels.patched_qwen3 import batch
from tests.routing.models import FAMILIES, made, steps
from veomni_hook.integrations.router_load import RouterLoadCallback
from veomni_hook.routing import monitor, record


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_choice(family, folder):
    model, inputs = made(family, folder), batch()
    plain = steps(model, inputs)
    with record(model) as routes, monitor(model) as load:
        loss, grads = steps(model, inputs)
    assert torch.equal(loss, plain[0])
    assert not [name for name, grad in grads.items() if not torch.equal(grad, plain[1][name])]
    assert load.counts.keys() == routes.calls.keys()
    for name, counts in load.counts.items():
        experts = routes.calls[name][0].experts
        assert torch.equal(counts, torch.bincount(routes[name].long().flatten(), minlength=experts))
        row = load.summary()[name]
        assert row.tokens == 24 and row.idle == int((counts == 0).sum()) == int(load.idle()[name])
        assert row.most == pytest.approx(counts.max().item() / (24 * 3 / experts))
        assert 0 < row.entropy < torch.tensor(float(experts)).log()


def test_the_entropy_is_that_of_probabilities(folder):
    """Of a softmax of all logits, and of sigmoid scores divided by their sum; in nats."""
    for family, score in (("gpt_oss", lambda x: x.softmax(-1)), ("minimax_m2", torch.sigmoid)):
        model, inputs, seen = made(family, folder), batch(), []
        router = next(each for name, each in model.named_modules() if name.endswith(("gate", "router")))
        hook = router.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out[0].detach()))
        with monitor(model) as load:
            steps(model, inputs)
        hook.remove()
        scores = score(seen[0].double())
        p = scores / scores.sum(-1, keepdim=True)
        name = next(iter(load.counts))
        assert load.entropy()[name].item() == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-5)


def test_a_checkpoint_counts_once_and_idle_experts_show(folder, tmp_path):
    model, inputs = made("qwen3_moe", folder), batch()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with monitor(model, entropy=False) as load:
        steps(model, inputs)
        model(input_ids=inputs["input_ids"][:, :1].repeat(2, 1))
        assert [int(each) for each in load.tokens.values()] == [28, 28]
    assert not load.entropy() and load.summary()["model.layers.0.mlp.gate"].entropy is None
    load.counts["model.layers.0.mlp.gate"][3] = 0
    load.plot(tmp_path / "load.svg", title="a < b")
    picture = ElementTree.parse(tmp_path / "load.svg").getroot()
    fields = picture.findall("{*}rect")
    assert len(fields) == 16 and fields[3].get("fill") == "#222222"
    assert fields[3][0].text == "model.layers.0.mlp.gate, expert 3: 0 tokens, 0.00 times the mean"
    load.reset()
    assert load.summary() == {}
    with monitor(model) as load:
        pass  # no forward pass is no error here


def test_a_trainer_logs_the_load(folder, tmp_path):
    model = made("qwen3_moe", folder)
    rows = [{name: each[0] for name, each in batch().items()} for _ in range(4)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        gradient_checkpointing=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    callback = RouterLoadCallback(plot=tmp_path / "load.svg")
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
    with monitor(model) as load:
        trainer.train()
    logs = [each for each in trainer.state.log_history if "loss" in each]
    assert len(logs) == 2
    for each in logs:
        assert 1 <= each["router/most"] <= each["router/most_of_layers"] <= 8
        assert each["router/idle"] >= 0 and 0 < each["router/entropy"] < 2.08
    assert "router/most" not in trainer.state.log_history[-1]  # the summary of the run
    assert (tmp_path / "load.svg").exists() and callback.load.counts == {}
    assert [int(each) for each in load.tokens.values()] == [48, 48]
