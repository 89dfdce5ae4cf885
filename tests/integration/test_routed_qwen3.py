"""Qwen3 with its routes, kernels and all, beside the installed one: training, generating, saving, compiling."""

import copy
import importlib.util
import pickle
from pathlib import Path

import pytest
import torch

from tests.importing import POSITIONS_ARE_COUNTED
from tests.kernels.matching import close
from tests.kernels.patched_qwen3 import NAME, UPSTREAM, batch, load, pair, tiny_config
from veomni_hook.kernels.linear_cross_entropy.output import LazyLogits
from veomni_hook.kernels.selection.process_choice import STATE, set_active, set_choice
from veomni_hook.patches.engine import Origin, patch_source
from veomni_hook.tools.report.explanation import explain

SOURCE = Path(importlib.util.find_spec(UPSTREAM).origin).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    return load(tmp_path_factory.mktemp("patched"))


@pytest.fixture(autouse=True)
def chosen():
    with STATE.restored():
        set_choice("torch")
        yield


ROUTES = {
    ("rms_norm/cast_before_weight", "Qwen3RMSNorm.forward"),
    ("add_rms_norm/cast_before_weight", "Qwen3DecoderLayer.forward"),
    ("gated_mlp/product", "Qwen3MLP.forward"),
    ("rotary/half_split", "Qwen3Attention.forward"),
    ("qk_norm_rotary/cast_before_weight_half_split", "Qwen3Attention.forward"),
    ("linear_cross_entropy/next_token", "Qwen3ForCausalLM.forward"),
    *[("host_metadata/positions_counted", "Qwen3Model.forward")] * POSITIONS_ARE_COUNTED,
}


def patch(source):
    origin = Origin(UPSTREAM, "modeling_qwen3.py", "transformers", "test")
    return patch_source(source, [], origin, idioms=True)


def routes(report):
    return {(f"{one.op}/{one.variant}", one.target) for one in report.applied if one.kind == "route"}


def test_everything_is_routed_and_nothing_upstream_is_lost():
    result = patch(SOURCE)
    assert routes(result.report) == ROUTES
    assert not result.report.missed
    # What has a guard around it stands under an `else`.
    lines = iter([line.strip() for line in result.plain.splitlines()])
    call = "apply_rotary_pos_emb(query_states, key_states, cos, sin)"
    missing = [line for line in SOURCE.splitlines() if call not in line and line.strip() not in lines]
    assert missing == []


@pytest.mark.parametrize(
    ("before", "after", "op"),
    [
        ("return torch.cat((-x2, x1), dim=-1)", "return torch.cat((x2, -x1), dim=-1)", "rotary"),
        ("q_embed = (q * cos) + (rotate_half(q) * sin)", "q_embed = (q * cos) - (rotate_half(q) * sin)", "rotary"),
        ("return self.weight * hidden_states.to(input_dtype)", "return (self.weight * hidden_states).to(input_dtype)", "rms_norm"),
        ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.act_fn(self.gate_proj(x)) + self.up_proj(x)", "gated_mlp"),
        ("logits = self.lm_head(hidden_states", "logits = 2 * self.lm_head(hidden_states", "linear_cross_entropy"),
    ],
)  # fmt: skip
def test_other_mathematics_is_not_routed_as_if_it_were_this(before, after, op):
    assert before in SOURCE
    lost = ROUTES - routes(patch(SOURCE.replace(before, after)).report)
    # Who routes a norm together with something else routes the norm.
    fused = {"rms_norm": {"qk_norm_rotary", "add_rms_norm"}, "rotary": {"qk_norm_rotary"}}
    assert {formula.partition("/")[0] for formula, _ in lost} == {op, *fused.get(op, ())}


def losses(model, inputs, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = []
    for _ in range(steps):
        loss = model(**inputs, use_cache=False)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


@pytest.mark.parametrize("choice", ["auto", "torch", "eager"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_trains_as_upstream_does(patched, choice, tied):
    set_choice(choice)
    upstream, model = pair(patched, tie_word_embeddings=tied)
    inputs = batch()
    expected, got = losses(upstream, inputs), losses(model, inputs)
    assert got == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    if choice == "eager":
        assert got == expected


def test_every_kernel_ran(patched):
    _, model = pair(patched)
    model(**batch())
    assert {row.backend for row in explain(model).rows} == {"torch"}
    set_choice("reference")
    model(**batch())
    assert {row.backend for row in explain(model).rows if row.op in ("qk_norm_rotary", "add_rms_norm")} == {
        "reference"
    }


def test_deactivated_it_is_upstream(patched):
    set_choice("auto")
    set_active(False)
    upstream, model = pair(patched)
    inputs = batch()
    expected, got = upstream(**inputs), model(**inputs)
    assert torch.equal(got.loss, expected.loss) and torch.equal(got.logits, expected.logits)


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_evaluates_and_generates_as_upstream_does(patched, choice):
    set_choice(choice)
    upstream, model = (each.eval() for each in pair(patched))
    inputs = batch()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, upstream(**inputs).logits)
    ids = inputs["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), upstream.generate(ids, **options))


def test_a_loop_that_reads_logits(patched):
    upstream, model = pair(patched)
    inputs = batch()
    kinds = []
    for each in (upstream, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each.seen = []
        for _ in range(3):
            output = each(**inputs)
            kinds.append(isinstance(output, LazyLogits))
            loss = output.loss + 0.1 * output.logits.logsumexp(-1).square().mean()
            each.seen += [loss.item(), output.logits.argmax(-1).sum().item()]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert kinds == [False] * 3 + [True, False, False]
    assert model.seen == pytest.approx(upstream.seen, rel=1e-5)


def test_outputs_as_tuples(patched):
    upstream, model = pair(patched)
    inputs = {**batch(), "use_cache": False, "return_dict": False}
    expected, got = upstream(**inputs), model(**inputs)
    assert len(got) == len(expected)
    assert torch.equal(got[1], expected[1])


def test_models_copy_pickle_and_save_as_upstream_does(patched, tmp_path):
    upstream, model = pair(patched)
    inputs = batch()
    model(**inputs)
    assert list(model.state_dict()) == list(upstream.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**inputs).loss, model(**inputs).loss)
    assert b"veomni" not in pickle.dumps(upstream).replace(NAME.encode(), b"")
    assert b"veomni_hook" not in pickle.dumps(model)
    model.save_pretrained(tmp_path)
    again = patched.Qwen3ForCausalLM.from_pretrained(tmp_path).train()
    close(again(**inputs).loss.detach(), upstream(**inputs).loss.detach(), 1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention", "Qwen3DecoderLayer", "Qwen3ForCausalLM"]
)
def test_compiles_in_one_graph(patched, name):
    settings = tiny_config(num_hidden_layers=1)
    hidden = torch.randn(1, 6, 32)
    cos, sin = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    made = {
        "Qwen3RMSNorm": lambda cls: (cls(32), (hidden,), {}),
        "Qwen3MLP": lambda cls: (cls(settings), (hidden,), {}),
        "Qwen3Attention": lambda cls: (cls(settings, 0), (hidden, (cos, sin), None), {}),
        "Qwen3DecoderLayer": lambda cls: (cls(settings, 0), (hidden,), {"position_embeddings": (cos, sin)}),
        "Qwen3ForCausalLM": lambda cls: (cls(settings), (), {**batch(1, 6), "use_cache": False}),
    }
    settings._attn_implementation = "sdpa"
    module, args, kwargs = made[name](getattr(patched, name))
    torch._dynamo.reset()
    compiled = torch.compile(module.train(), backend="aot_eager", fullgraph=True)
    got, expected = compiled(*args, **kwargs), module(*args, **kwargs)
    pairs = [(got["loss"], expected["loss"])] if isinstance(got, dict) else [(got, expected)]
    for found, truth in pairs:
        found, truth = (x[0] if isinstance(x, tuple) else x for x in (found, truth))
        close(found.detach(), truth.detach(), 1e-5)
        found.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_two_models_of_one_class_do_not_disturb_each_other(patched):
    _, reader = pair(patched)
    _, other = pair(patched)
    inputs = batch()
    assert reader(**inputs).logits.sum()
    assert not isinstance(reader(**inputs), LazyLogits)
    assert isinstance(other(**inputs), LazyLogits)
