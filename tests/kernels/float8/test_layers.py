"""Which linear layers of a model multiply in float8, and what training with them gives."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from veomni_hook import bind
from veomni_hook.errors import SettingsError
from veomni_hook.kernels.float8.layers import adapt, places, restore
from veomni_hook.kernels.float8.linear import Float8Linear
from veomni_hook.kernels.float8.setting import parsed
from veomni_hook.kernels.selection.process_choice import STATE, set_active
from veomni_hook.settings import precision_of
from veomni_hook.tools.report.precision import notes_on_precision

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(1, 33).reshape(2, 16)


def dense(**changes):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | changes)).train()


def in_float8(model):
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def names(model):
    return sorted({name.rpartition(".")[2] for name in in_float8(model)})


def test_linear_layers_of_decoder_layers():
    model = dense(tie_word_embeddings=True)
    weights = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    assert adapt(model, parsed("float8")) is model
    assert names(model) == sorted(ATTENTION + MLP)
    assert len(in_float8(model)) == 3 * 7
    assert type(model.lm_head) is nn.Linear
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == weights
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert names(copy.deepcopy(model)) == names(model)
    restore(model)
    assert not in_float8(model)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("float8,first=1", {1, 2}),
        ("float8,last=2", {0}),
        ("float8,first=1,last=1", {1}),
        ("float8,first=2,last=2", set()),
    ],
)
def test_first_and_last_layers_stay(text, expected):
    model = adapt(dense(), parsed(text))
    assert {int(name.split(".")[2]) for name in in_float8(model)} == expected


def test_named_modules_stay():
    assert names(adapt(dense(), parsed("float8,skip=k_proj+mlp"))) == ["o_proj", "q_proj", "v_proj"]
    assert names(adapt(dense(), parsed("float8,skip=self_attn.q_proj+proj"))) == sorted(
        ["k_proj", "o_proj", "v_proj", *MLP]
    )


@pytest.mark.parametrize("kind", [Qwen2MoeForCausalLM, MixtralForCausalLM])
def test_routers_and_gates_stay(kind):
    # 16 experts: the widths of their router would fit.
    experts = {
        "num_local_experts": 16, "num_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
    }  # fmt: skip
    config = {Qwen2MoeForCausalLM: Qwen2MoeConfig, MixtralForCausalLM: MixtralConfig}[kind]
    model = adapt(kind(config(**SIZES, **experts)), parsed("float8"))
    shared = MLP if kind is Qwen2MoeForCausalLM else []
    assert names(model) == sorted(ATTENTION + shared)


def test_gates_in_lists_of_experts_stay():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 16)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.switch = Router(), nn.Linear(32, 1)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 48)) for _ in range(16))

    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"mlp": Block(), "q": nn.Linear(32, 16)}) for _ in range(2))
    adapt(model, parsed("float8"))
    assert len(in_float8(model)) == 2 * (16 + 1)
    reasons = {place.name: place.reason for place in places(model)}
    assert reasons["layers.0.mlp.router.layer"] == "it is a router or a gate"
    assert reasons["layers.0.q"] == ""


def test_convolutions_are_no_experts():
    """As many channels as a linear layer beside them has outputs, as in layers of linear attention."""
    mixer = nn.Module()
    mixer.conv1d, mixer.projection = nn.Conv1d(48, 48, 4, groups=48), nn.Linear(32, 48)
    model = nn.Module()
    model.layers = nn.ModuleList([mixer])
    assert in_float8(adapt(model, parsed("float8"))) == ["layers.0.projection"]


def test_towers_stay():
    config = Gemma3Config(
        text_config=SIZES | {"sliding_window": 8},
        vision_config={
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
        },
        mm_tokens_per_image=4,
    )  # fmt: skip
    model = adapt(Gemma3ForConditionalGeneration(config), parsed("float8"))
    assert in_float8(model) and all("language_model" in name for name in in_float8(model))


def test_quantised_layers_and_adapters_stay():
    class Linear4bit(nn.Linear):
        pass

    model = dense()
    layer = model.model.layers[0]
    layer.self_attn.q_proj = Linear4bit(32, 32)
    adapted = nn.Module()
    adapted.base_layer, adapted.in_features = layer.self_attn.v_proj, 32
    adapted.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16, bias=False)})
    layer.self_attn.v_proj = adapted
    adapt(model, parsed("float8"))
    reasons = {place.name.removeprefix("model.layers.0."): place.reason for place in places(model)}
    assert reasons["self_attn.q_proj"] == "it is a Linear4bit"
    assert reasons["self_attn.v_proj.lora_A.default"] == "it is an adapter"
    assert reasons["self_attn.v_proj.base_layer"] == ""
    assert type(adapted.base_layer) is Float8Linear


def test_a_model_in_mx(monkeypatch):
    """Layers and what `explain` says; the other format in one model; and the way back."""
    model = dense(head_dim=16)
    plain = model(input_ids=IDS, labels=IDS).loss
    adapt(model, parsed("mxfp8,skip=k_proj"))
    assert names(model) == ["o_proj", "q_proj", "v_proj"]  # its MLP has a width of 48
    assert "MXLinear(in_features=64, out_features=32" in str(model)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert 0 < (loss - plain).abs() < 0.05 * plain
    notes = list(notes_on_precision(model))
    assert notes[0] == "precision: in mxfp8: 9 linear layers: 3 q_proj, 3 v_proj, 3 o_proj"
    with monkeypatch.context() as patched:
        patched.setattr(STATE, "precision", "mxfp8")
        assert any("not in mxfp8: 3 k_proj" in note for note in notes_on_precision(model))
    bind(model, precision="float8")
    assert "MXLinear" not in str(model) and names(model) == sorted(ATTENTION + MLP)
    adapt(model, parsed("mxfp8"))
    assert "MXLinear" not in str(model)  # what multiplies in float8 keeps doing so
    bind(model, precision="none")
    assert torch.equal(model(input_ids=IDS, labels=IDS).loss, plain)


def test_experts_in_mx(modules):
    _, home = modules("qwen3_moe")
    torch.manual_seed(0)
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "hidden_size": 64}
    model = home.Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | more)).train()
    plain = model(input_ids=IDS, labels=IDS).loss
    bind(model, moe_experts="mxfp8")  # by name: the setting would ask who chose upstream's kernel
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert 0 < (loss - plain).abs() < 0.05 * plain
    experts = [place for place in places(model) if place.slot is not None]
    assert [place.slot.outcome(place.module).backend for place in experts] == 3 * ["mxfp8"]
    note = "precision: in mxfp8: 3 experts, on a GPU from 1,024 rows of an expert on"
    assert note in list(notes_on_precision(model))


def test_explain_says_what_is_in_float8_and_why_not():
    model = dense(intermediate_size=40)
    assert list(notes_on_precision(model)) == []
    adapt(model, parsed("float8"))
    model(input_ids=IDS, labels=IDS).loss.backward()
    computed, *others = notes_on_precision(model)
    assert computed == "precision: in float8: 12 linear layers: 3 q_proj, 3 k_proj, 3 v_proj, 3 o_proj"
    assert others == [
        "precision: not in float8: 3 gate_proj, 3 up_proj: its weight is 40 x 32, which are no multiples of 16",
        "precision: not in float8: 3 down_proj: its weight is 32 x 40, which are no multiples of 16",
    ]
    model.double()(input_ids=IDS)
    assert any("the input is torch.float64" in note for note in notes_on_precision(model))
    with STATE.restored():
        set_active(active=False)
        assert any("the hook is not active" in note for note in notes_on_precision(model))


def test_an_inactive_hook_multiplies_as_upstream():
    model = dense()
    plain = model(input_ids=IDS).logits
    adapt(model, parsed("float8"))
    assert not torch.equal(model(input_ids=IDS).logits, plain)
    with STATE.restored():
        set_active(active=False)
        assert torch.equal(model(input_ids=IDS).logits, plain)


def test_one_model_alone():
    model, other = dense(), dense()
    bind(model, precision="float8,skip=mlp")
    assert names(model) == sorted(ATTENTION)
    assert not in_float8(other)
    bind(model, precision="none")
    assert not in_float8(model)
    with pytest.raises(SettingsError, match="illegal value 'fp8'") as caught:
        bind(model, precision="fp8")
    assert "float8" in caught.value.fix


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("float8", "float8"),
        (" float8 , last = 1,first=2", "float8,first=2,last=1"),
        ("float8,skip=k_proj + mlp.up_proj", "float8,skip=k_proj+mlp.up_proj"),
        ({"float8": True, "skip": ["k_proj", "v_proj"], "first": 1}, "float8,first=1,skip=k_proj+v_proj"),
        ("float8,first=0", "float8"),
        ({"float8": False}, ""),
        ("none", ""),
        ("", ""),
    ],
)
def test_values_of_the_setting(value, text):
    assert precision_of(value) == text
    assert precision_of(text) == text


@pytest.mark.parametrize(
    "value",
    ["fp8", "float8=1", "first=1", "float8,first", "float8,first=-1", "float8,last=x", "float8,skip=",
     "float8,skip=a b", "float8,float8", "float8,middle=1", 8, {"float8": "yes"}],
)  # fmt: skip
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="float8,skip=k_proj"):
        precision_of(value)


def test_checkpoints_are_those_without_it(tmp_path):
    model = dense()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapt(model, parsed("float8")).save_pretrained(tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.state_dict().items())
    adapt(loaded, parsed("float8"))
    assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


STEPS, WINDOW = 200, 20


def curve(seed, text=""):
    """The losses of a small model that learns a chain of tokens, in bfloat16, averaged over windows."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_hidden_layers": 2})).bfloat16().train()
    adapt(model, parsed(text))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, foreach=True)
    after = torch.randint(64, (64, 3), generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        tokens = [torch.randint(64, (4,), generator=draw)]
        for _ in range(23):
            tokens.append(after[tokens[-1], torch.randint(3, (4,), generator=draw)])
        ids = torch.stack(tokens, 1)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses).view(-1, WINDOW).mean(1)


def test_a_loss_curve_is_within_the_spread_of_two_seeds():
    one, other, float8 = curve(0), curve(1), curve(0, "float8")
    assert one[-1] < 0.5 * one[0]
    spread = (one - other).abs().mean()
    assert 0 < (float8 - one).abs().mean() < spread
